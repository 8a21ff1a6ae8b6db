"""The launcher's command line: what all backends share, and groups of options that some of them share."""

import argparse
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lockstep.config_fields import option_path
from lockstep.errors import ConfigError
from lockstep.launch import setup_vm
from lockstep.launch.backend import Backends
from lockstep.launch.sync import modules_of_configuration

CAPACITY_TYPES = ("on-demand", "spot", "reserved", "best-effort")
DEBUG = "--debug"  # the option that shows the stack of every error, whatever the command
PROG = "lockstep launch"
USAGE = f"{PROG} [run] [options] -- command [arguments]\n       {PROG} status|logs|stop|delete NAME"


class Parser(argparse.ArgumentParser):
    """A parser that takes ``--dry_run`` for ``--dry-run``, and the other way round, for every option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class does, after each name was replaced by its spelling in the table of options."""
        spelling = {name.replace("_", "-"): name for name in self._option_string_actions}
        words = []
        for word in args or ():
            name, equals, value = word.partition("=")
            known = name.startswith("--") and spelling.get(name.replace("_", "-"))
            words.append(f"{known}{equals}{value}" if known else word)
        return super().parse_known_args(words, namespace)


def parse_options(argv: Sequence[str], backends: Backends) -> argparse.Namespace:
    """Read the options before ``--`` and the command after it."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    common = Parser(prog=PROG, usage=USAGE, add_help=False, allow_abbrev=False)
    add_common_options(common, backends)
    known, _ = common.parse_known_args(argv[:cut])
    name = known.backend or default_backend(argv[:cut])
    if name not in backends:
        common.error(f"no backend {name!r}; there is {', '.join(sorted(backends))}")
    parser = Parser(
        prog=PROG,
        usage=USAGE,
        description="Start one command on every process of a job, show what they print, and end them together.",
        epilog=f"The options of another backend: {PROG} --backend NAME --help. "
        f"Example: {PROG} --processes 2 -- lockstep train-lm --config_path config/demo.yaml",
        parents=[common],
        allow_abbrev=False,
    )
    backends[name]().add_options(parser)
    options: argparse.Namespace = parser.parse_args(argv[:cut])
    options.backend = name
    options.command = argv[cut + 1 :]
    if not options.command:
        parser.error("no command given: put it after --, as in lockstep launch --processes 2 -- lockstep train-lm ...")
    if getattr(options, "sync", None):
        options.sync += modules_of_configuration(options.command, options.sync)
    return options


def add_backend_options(parser: argparse.ArgumentParser, backends: Backends) -> None:
    """Add the options of every backend, for shell completion; those of the same name are one."""
    add_common_options(parser, backends)
    for make in backends.values():
        make().add_options(parser)


def own_words(words: Sequence[str]) -> Sequence[str]:
    """The words of a command line before ``--``, after which another program's begin."""
    return words[: words.index("--")] if "--" in words else words


def without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """A command line without ``--debug``, and whether it was there; another program's after ``--`` stays with it."""
    own = own_words(words)
    return [word for word in own if word != DEBUG] + list(words[len(own) :]), DEBUG in own


def given_backend(argv: Sequence[str]) -> str | None:
    """The value of ``--backend``; None where it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", nargs="?")
    known, _ = parser.parse_known_args(argv[: argv.index("--")] if "--" in argv else argv)
    name: str | None = known.backend
    return name


def default_backend(words: Sequence[str]) -> str:
    """The backend without ``--backend``: ``tpu-vm`` where a TPU is named, ``ssh`` for hosts, else ``local``."""
    names = {word.partition("=")[0].replace("-", "_") for word in words}
    if names & {"__tpu_name", "__tpu_type"}:
        return "tpu-vm"
    return "ssh" if "__hosts" in names else "local"


def add_common_options(parser: argparse.ArgumentParser, backends: Collection[str]) -> None:
    """Add what every backend has."""
    add = parser.add_argument_group("all backends").add_argument
    add(
        "--backend",
        choices=sorted(backends),
        help="where the processes run; also module:Class of your own (default: tpu-vm with --tpu_name or --tpu_type, "
        "ssh with --hosts, else local)",
    )
    add("--env", type=name_value, action="append", default=[], metavar="NAME=VALUE", help="set in every process")
    add(
        "--env_file",
        type=option_path,
        metavar="FILE",
        help="lines NAME=VALUE with secrets, set in every process; the values are never shown, logged or kept",
    )
    add("--dry-run", action="store_true", help="print every command or manifest, ready to paste, and do nothing")
    add(DEBUG, action="store_true", help="show the stack of every error")


RETRIES_HELP = (
    "how often the job is started again where another try may help: a worker was lost, killed or out of memory, or its "
    "hardware, runtime or network failed; never after an error of the program (default 0)"
)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add what backends have whose jobs run on other machines, and can go on without the launcher."""
    add = parser.add_argument_group("jobs on other machines").add_argument
    add("--name", help="the job's name for status, logs, stop and delete (default: from the date)")
    add(
        "--foreground",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stay, show the output, and end the job with this command; --no-foreground returns once it runs",
    )
    add("--retries", type=number, default=0, help=RETRIES_HELP)
    add(
        "--sync",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or directory below the present one that is copied to every worker, where the command then runs "
        "in the copy; of a git repository what git does not ignore; with the command's configuration come the modules "
        "beside it that it names (module:name); may be repeated",
    )
    add(
        "--require-process-count",
        type=count,
        metavar="N",
        help="refuse to train with another number of processes (default: the number of workers)",
    )


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add `add_job_options`, and how the launcher deals with workers that it reaches one by one."""
    add_job_options(parser)
    add = parser.add_argument_group("workers").add_argument
    add("--workdir", metavar="DIR", help="where the command runs on a worker (default: the copy of --sync, or home)")
    add("--grace_s", type=float, default=60.0, help="seconds between SIGTERM and SIGKILL (default 60)")
    add(
        "--lease_s",
        type=float,
        default=120.0,
        help="seconds without a sign of the launcher after which a worker stops the job (default 120)",
    )
    add("--unreachable_s", type=float, default=120.0, help="seconds until a worker counts as lost (default 120)")
    add("--preflight", action=argparse.BooleanOptionalAction, default=True, help="look at the workers before the start")
    add(
        "--preflight_sudo",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let preflight ask `sudo -n` which processes of other users have the chips (it reads /proc, no more); "
        "--no-preflight_sudo looks at those of the own user alone",
    )


def add_tpu_options(parser: argparse.ArgumentParser) -> None:
    """Add what backends for TPU slices share."""
    add = parser.add_argument_group("TPU slices").add_argument
    add("--tpu_name", metavar="NAME", help="the name of the slice; one that exists is used as it is")
    add("--tpu_type", metavar="TYPE", help="chip and size, for example v5p-64 or v6e-8")
    add("--zone", help="for example us-east5-a")
    add("--capacity_type", choices=CAPACITY_TYPES, default="on-demand", help="how it is paid for (default on-demand)")
    add_slices_option(add)


def add_google_options(parser: argparse.ArgumentParser) -> None:
    """Add `add_tpu_options`, and what machines of Google Cloud have, whichever API rents them."""
    add_tpu_options(parser)
    add = parser.add_argument_group("Google Cloud").add_argument
    add("--project", default="", help="the project (default: that of gcloud's configuration)")
    add("--network", default="", help="the network of new machines (default: default)")
    add("--service_account", default="", help="the account of new machines (default: the project's)")
    add("--internal_ip", action="store_true", help="machines have no external address, and ssh uses the internal one")
    add("--ssh_user", default="", help="the user on the machines (default: the one that gcloud uses)")
    add("--ssh_key", type=absolute, default="~/.ssh/google_compute_engine", help="the ssh key (default: the one that "
        "gcloud makes)")  # fmt: skip
    add("--wait_s", type=float, default=86400.0, help="seconds to wait for the slice, then give up (default a day)")
    add("--poll_s", type=float, default=10.0, help="seconds between two looks at its state (default 10)")
    add("--setup", choices=("auto", "none"), default="auto", help="auto: install this checkout on every machine, "
        "once per version; none: the machines have it")  # fmt: skip
    add("--venv", default="", metavar="DIR", help="an environment on the machines that has the package: nothing is "
        "installed, and its programs are found first")  # fmt: skip
    add("--extras", default=setup_vm.EXTRAS, help=f"optional dependencies to install (default {setup_vm.EXTRAS})")


def add_slices_option(add: Callable[..., object]) -> None:
    """Add ``--slices`` and what belongs to it."""
    add("--slices", type=slice_range, default=1, metavar="N|MIN-MAX", help="how many slices, joined over the "
        "data-centre network (default 1); 1-2 asks for two and goes on with one where need be")  # fmt: skip
    add("--slices_wait_s", type=float, default=600.0, help="with --slices MIN-MAX: seconds to wait for more slices "
        "once MIN of them can be used (default 600)")  # fmt: skip


def slice_range(text: str) -> int | str:
    """Read ``N`` or ``MIN-MAX``, as a type of argparse; what it returns is kept in the job's record."""
    least, dash, most = text.partition("-")
    if not dash:
        return count(text)
    if count(least) >= int(most):
        raise argparse.ArgumentTypeError(f"{text} is not MIN-MAX with MIN below MAX; write 1-2, or 2 for always two")
    return text


def slice_counts(options: argparse.Namespace) -> tuple[int, int]:
    """The least and the most slices of ``--slices``."""
    least, dash, most = str(options.slices).partition("-")
    for wrong, text in (
        (not options.tpu_type, "needs --tpu_type: a slice that was lost is asked for again"),
        (options.require_process_count, "has no one number of processes: leave --require-process-count out"),
    ):
        if dash and wrong:
            raise ConfigError(f"--slices {options.slices} {text}.")
    return int(least), int(most or least)


def name_value(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``, as a type of argparse."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text} has no '='; write NAME=VALUE")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(
            f"{name!r} is no name of a variable; write NAME=VALUE with letters, digits and '_' before the '='"
        )
    return name, value


def absolute(text: str) -> str:
    """Read a path that the job's record keeps, for launchers in other directories, as a type of argparse."""
    return os.path.abspath(os.path.expanduser(text))


def count(text: str) -> int:
    """Read a number of at least 1, as a type of argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least 1")
    return int(text)


def number(text: str) -> int:
    """Read a number of at least 0, as a type of argparse."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least 0")
    return int(text)
