"""One process of a group: it joins the job, then runs one body after another until the tests hang up.

python -m tests.multiprocess.worker serve ADDRESS           for tests/multiprocess/pool.py
python -m tests.multiprocess.worker once MODULE NAME ARGS   one body and no answer, for `run_unattended`
"""

import importlib
import json
import sys
from multiprocessing import connection
from typing import Any

from lockstep import hosts as lockstep_hosts
from lockstep.hosts import Hosts, Ledger
from tests.multiprocess import leftovers, permuted

HOST_TIMEOUT_S = 60.0
MARK = "---- tests.multiprocess.worker begins body "
"""Before the number of a body, in a line of its own, in the log of its process."""


def join() -> Hosts:
    """Join the job that the launcher's environment describes."""
    permuted.permute_as_told()
    config = lockstep_hosts.DistributedConfig(timeout_s=HOST_TIMEOUT_S, initialization_timeout_s=60)
    return lockstep_hosts.start(config)


def serve(address: str) -> None:
    """Answer each request that comes over ``address`` (a Unix socket) with what the body returned and left behind."""
    hosts = join()
    with connection.Client(address, "AF_UNIX") as line:
        line.send(hosts.index)
        while True:
            hosts.phase("waiting for the next test")
            try:
                request = line.recv()
            except EOFError:
                return
            line.send(answer(hosts, *request))


def answer(hosts: Hosts, number: int, module: str, name: str, arguments: str) -> dict[str, Any]:
    """Run one body between two barriers.

    Args:
        hosts: of this process.
        number: of the body, for its place in the log.
        module: with the body.
        name: of the body.
        arguments: JSON list.

    Returns:
        JSON of what it returned, what it left behind, and the state of the ledger of its launches.

    Raises:
        BaseException: whatever the body raises; the process then ends, and with it the group.
    """
    print(f"{MARK}{number}", flush=True)
    body = getattr(importlib.import_module(module), name)
    hosts.ledger = Ledger()
    hosts.barrier("test-start")
    before = leftovers.look(hosts)
    hosts.barrier("test-looked")
    result = json.dumps(body(hosts, *json.loads(arguments)))
    hosts.barrier("test-end")
    _forget()
    return {"result": result, "left": leftovers.left(before, hosts), "ledger": hosts.ledger.state}


def _forget() -> None:
    """Empty the caches of test modules, which may hold models and engines."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def once(module: str, name: str, arguments: str) -> None:
    """Run one body, whose end is the end of the process."""
    hosts = join()
    body = getattr(importlib.import_module(module), name)
    hosts.barrier("test-start")
    body(hosts, *json.loads(arguments))
    hosts.barrier("test-end")


if __name__ == "__main__":
    how, *values = sys.argv[1:]
    lockstep_hosts.run_main(lambda: {"serve": serve, "once": once}[how](*values))
