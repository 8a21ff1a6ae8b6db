"""Which programs are being compiled."""

import io

from rich.console import Console

from lockstep.main.plan.compile_progress import CompileProgress


def console(**values):
    return Console(file=io.StringIO(), width=100, **values)


def test_a_log_has_a_line_for_each_event():
    log = console()
    progress = CompileProgress(log)
    with progress.live() as live:
        live("decode", "compiling")
        live("decode", "12 s")
    lines = [line.partition("] ")[2] for line in log.file.getvalue().splitlines()]
    assert lines == ["decode: compiling", "decode: 12 s"]


def test_a_name_is_no_markup():
    log = console()
    CompileProgress(log)("step [red]", "compiling")
    assert "step [red]: compiling" in log.file.getvalue()


def test_quiet_prints_nothing():
    log = console()
    with CompileProgress(log, quiet=True).live() as progress:
        progress("decode", "compiling")
    assert log.file.getvalue() == ""


def test_a_terminal_shows_what_is_being_compiled_and_lines_of_what_ended():
    terminal = console(force_terminal=True)
    progress = CompileProgress(terminal)
    with progress.live():
        progress("prefill", "compiling")
        progress("decode", "compiling")
        assert progress._line() == "compiling prefill, decode"
        progress("prefill", "3 s")
        assert progress._line() == "compiling decode"
        progress("decode", "4 s")
        assert progress._line() == "planning"
    shown = terminal.file.getvalue()
    assert "prefill: 3 s" in shown and "prefill: compiling" not in shown
