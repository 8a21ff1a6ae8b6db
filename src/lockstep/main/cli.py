"""The ``lockstep`` command."""

import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from lockstep import exits
from lockstep.errors import LockstepError
from lockstep.files import advice_of
from lockstep.main.commands import COMMANDS, find_command
from lockstep.printable import error_line

HELP = ("-h", "--help")


def run(arguments: Sequence[str]) -> int:
    """Run a command, or show its help."""
    if not arguments or arguments[0] in HELP:
        from lockstep.main.help import overview

        _show(overview())
        return exits.DONE if arguments else exits.USAGE
    if arguments[0] == "--version":
        import importlib.metadata

        _show(f"lockstep {importlib.metadata.version('jax-lockstep')}")
        return exits.DONE
    from lockstep.launch import own_words

    command, rest = find_command(arguments[0]), list(arguments[1:])
    asked = next((index for index, word in enumerate(own_words(rest)) if word in HELP), None)
    if asked is not None and not command.own_help:
        from lockstep.main.help import command_help

        after = rest[asked + 1 : asked + 2]
        _show(command_help(command, after[0] if after and not after[0].startswith("-") else None))
        return exits.DONE
    return command.run(rest)


def main() -> None:
    """Entry point: run the command of this process's arguments and leave the job in order."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While modules are imported Ctrl-C ends the process: an exception would show the import, or break one of C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lockstep.launch import without_debug

    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no character that its encoding does not have ends a command
    arguments, debug = without_debug(sys.argv[1:])
    for command in COMMANDS:
        if command.name in arguments[:1] and not command.joins_job:
            sys.exit(run_alone(sys.argv[1:] if command.own_help else arguments, debug))
    from lockstep.hosts import run_main

    run_main(lambda: run(arguments), debug=debug)


def _open_closed_streams() -> None:
    """Open standard streams that are closed, as by ``>&-``, to nowhere: else a file of ours takes such a number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def run_alone(arguments: Sequence[str], debug: bool) -> int:
    """Run a command that is not a process of a job, without loading what a job needs."""
    try:
        return run(arguments)
    except LockstepError as error:
        if debug:
            traceback.print_exc()
        print(error_line(error), file=sys.stderr)
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if debug or not (advice := advice_of(error)):
            raise
        print(error_line(error, advice), file=sys.stderr)
        return exits.FAILED


def _show(text: str) -> None:
    """Print a text of which a reader may want the beginning alone, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        if not _reader_has_left():
            raise


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more; what is left for it is then dropped, so that Python ends well."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # for the event that none asks for: an error
    left = bool(pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left
