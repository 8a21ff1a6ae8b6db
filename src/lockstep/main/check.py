"""``lockstep check``: run a script on simulated processes and find what would stop it on a pod."""

import argparse
import json
import signal
from collections.abc import Sequence

from lockstep.check import KINDS, check_command, print_at_once, print_report, write_page
from lockstep.config_fields import option_path
from lockstep.errors import ConfigError, check_output
from lockstep.files import write_file
from lockstep.launch import interrupt, signals_to
from lockstep.main.commands import Arguments, seconds
from lockstep.printable import write_to_stdout
from lockstep.terminal import Console


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="how many processes (default: 2)")
    parser.add_argument(
        "--devices_per_process", type=int, default=2, metavar="N", help="CPU devices of each process (default: 2)"
    )
    parser.add_argument("--json", type=option_path, metavar="FILE", help="also write what was found as JSON")
    parser.add_argument("--html", type=option_path, metavar="FILE", help="also write it as a page for a browser")
    parser.add_argument(
        "--ignore", action="append", default=[], choices=sorted(KINDS), metavar="KIND",
        help=f"leave findings of this kind out; can be repeated: {', '.join(KINDS)}",
    )  # fmt: skip
    parser.add_argument(
        "--stall_s", type=seconds, default=15.0, metavar="S",
        help="end processes that wait for each other after this many seconds without a launch (default: 15)",
    )  # fmt: skip


def main(arguments: Sequence[str], *, console: Console | None = None) -> int:
    """Check a command."""
    parser = Arguments("check", add_options)
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        raise ConfigError("lockstep check has no command. Write it after --: lockstep check -- python train.py.")
    if options.processes < 2 or options.devices_per_process < 1:
        raise ConfigError(
            f"--processes is {options.processes} and --devices_per_process {options.devices_per_process}; there must "
            "be at least 2 processes, to be compared, with at least 1 device each."
        )
    for key, path in (("--json", options.json), ("--html", options.html)):
        if path is not None:
            check_output(key, path)
    console = console or Console(markup=True)
    numbers: list[int] = []

    def end(number: int) -> None:
        numbers.append(number)
        interrupt(number)

    try:
        with signals_to(end):  # without a handler SIGTERM and SIGHUP would leave the processes running
            result = check_command(
                command,
                processes=options.processes,
                devices=options.devices_per_process,
                stall_s=options.stall_s,
                ignore=options.ignore,
                on_finding=lambda finding: write_to_stdout(lambda: print_at_once(finding, console)),
            )
    except KeyboardInterrupt:
        return 128 + (numbers or [signal.SIGINT])[0]
    write_to_stdout(lambda: print_report(result, console))
    if options.json is not None:
        write_file(options.json, json.dumps(result.as_json(), indent=1) + "\n")
    if options.html is not None:
        write_page(result, options.html)
    return result.exit_code
