"""One process of a group: it joins the job, then runs one function after another until the test run hangs up.

python -m lockstep.testing.worker ADDRESS JSON    for `Group`; the JSON has the other arguments of `serve`
python -m lockstep.testing.worker once JSON       for `function_command`; the JSON has the arguments of `once`
"""

import faulthandler
import gc
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

from lockstep import hosts as lockstep_hosts
from lockstep.hosts import Hosts, Ledger
from lockstep.testing import checks
from lockstep.testing.protocol import (
    MARK,
    Arguments,
    Hello,
    Leftovers,
    Outcome,
    Placeholder,
    Reference,
    Request,
    print_failure,
)

HOST_TIMEOUT_S = 60.0  # seconds that the processes of a group wait for each other in a call of `Hosts`
JOIN_S = 60  # seconds in which all processes of a group must be there


def join(setup: Mapping[str, str] | None, patience: float) -> Hosts:
    """Call the function that is to run first, then join the job that the environment describes."""
    if setup is not None:
        Reference(**setup).load()()
    config = lockstep_hosts.DistributedConfig(
        timeout_s=HOST_TIMEOUT_S * patience, initialization_timeout_s=round(JOIN_S * patience)
    )
    return lockstep_hosts.start(config)


def serve(address: str, path: list[str], setup: Mapping[str, str] | None, patience: float) -> None:
    """Run each function that is asked for over ``address``, a Unix socket, and answer how it ended and what it left."""
    extend_import_path(path)
    hosts = join(setup, patience)
    faulthandler.register(signal.SIGUSR1)  # the test run asks where a process is that is late
    gc.freeze()  # what is imported is no garbage, and each test ends with a look for all that is
    with connection.Client(address, "AF_UNIX") as line:
        line.send(Hello(index=hosts.index, pid=os.getpid()))
        while True:
            hosts.phase("waiting for the next test")
            try:
                request: Request = line.recv()
                print(f"{MARK}{request.number}", flush=True)
                extend_import_path(request.path)
                hosts.ledger = Ledger()
                tests = checks.package_of_tests(request.function.module)
                hosts.barrier("test-start")
                before = checks.look(hosts, tests)
                hosts.barrier("test-looked")
                line.send(run(request, hosts))
                line.recv()
                hosts.barrier("test-end")
                checks.forget(tests)
                line.send(Leftovers(lines=checks.left(before, hosts, tests), ledger=hosts.ledger.state))
            except EOFError:
                return


def extend_import_path(path: Any) -> None:
    """Add what this process lacks of the test run's import path."""
    sys.path += [entry for entry in path if entry not in sys.path]


def run(request: Request, hosts: Hosts) -> Outcome:
    """Run a function; an error that leaves it is printed, with its stack, to the log of this process."""
    try:
        function = request.function.load()
        arguments: Arguments = pickle.loads(request.arguments)
        ordered, named = arguments
        returned = function(
            *(hosts if value is Placeholder.HOSTS else value for value in ordered),
            **{name: hosts if value is Placeholder.HOSTS else value for name, value in named.items()},
        )
        return Outcome(result=json.dumps(returned, default=_plain))
    except BaseException as error:
        # Those of pytest are no Exceptions. A signal or an exit ends the process, and with it the group.
        pytest = sys.modules.get("pytest")
        if pytest is not None and isinstance(error, pytest.skip.Exception):
            return Outcome(skipped=str(error))
        if not isinstance(error, Exception) and not (pytest and isinstance(error, pytest.fail.Exception)):
            raise
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this function
        print_failure(error, request.function.file)
        first, *_ = [*str(error).splitlines(), ""]
        return Outcome(failed=f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _plain(value: Any) -> Any:
    """Return NumPy's and JAX's numbers and arrays as plain numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"the function returned a {type(value).__name__}, which is no JSON value: return numbers, text, lists, "
        "dictionaries, NumPy arrays, or arrays that this process has as a whole."
    )


def once(reference: Mapping[str, str], arguments: list[Any], setup: Mapping[str, str] | None, patience: float) -> None:
    """Run one function, whose end is the end of the process."""
    hosts = join(setup, patience)
    function = Reference(**reference).load()
    hosts.barrier("test-start")
    function(hosts, *arguments)
    hosts.barrier("test-end")


if __name__ == "__main__":
    how, settings = sys.argv[1:]
    values = json.loads(settings)
    lockstep_hosts.run_main(lambda: once(**values) if how == "once" else serve(how, **values))
