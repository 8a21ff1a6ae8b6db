"""What of a text that others wrote reaches a terminal, and what is hidden of names and URLs."""

import ast
import errno
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from lockstep.printable import (
    bytes_text,
    error_text,
    get_logger,
    hide_credentials,
    keep_root_logger,
    printable,
    seconds_text,
    show_log,
    visible,
    without_credentials,
    without_secrets,
)
from tests.sources import sources

HOSTILE = "a\x1b[31m\x07\r\tb\nc\x9b\u202e\ud800 ü"


def test_a_text_keeps_its_lines_and_nothing_that_a_terminal_obeys():
    assert printable(HOSTILE) == "a\\x1b[31m\\x07\\r\\tb\nc\\x9b\\u202e\\ud800 ü"
    assert all(line.isprintable() for line in printable(HOSTILE).split("\n"))


def test_on_one_line_it_has_signs_for_line_ends():
    assert visible(f" {HOSTILE} ") == "a\\x1b[31m\\x07␍⇥b↵c\\x9b\\u202e\\ud800 ü"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**20 // 2, "1.50 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (2**30, "1.00 GiB"),
        (-5 * 2**20, "-5.00 MiB"),
    ],
)
def test_the_unit_is_the_largest_that_the_size_fills(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (2e-7, "0.2 µs"), (1.5e-5, "15 µs"), (0.0123, "12.3 ms"), (75.0, "75 s")]
)
def test_seconds_have_the_unit_that_they_fill(value, text):
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:hush@host/a/b", "https://host/a/b"),
        ("see https://h/a?sig=hush&x=1, and s3://k:hush@b/c.", "see https://h/a?… and s3://b/c."),
        ("az://c/part-?.jsonl", "az://c/part-?.jsonl"),
        ("hf://datasets/a/b@main/c", "hf://datasets/a/b@main/c"),
        ("'https://h/?token=hush'", "'https://h/?…'"),
        ("https://user:hu@sh@host/a", "https://host/a"),
        ("HTTPS://h/a?hush", "HTTPS://h/a?…"),
        ("https://h/a#access_token=hush", "https://h/a?…"),
        ("s3://b/c?a://k:hush@d", "s3://b/c?…"),
        (r'"https:\/\/user:hush@h\/a"', r'"https:\/\/h\/a"'),
        ("1https://user:hush@h", "1https://h"),
        ("a@b.c is no URL?x=y", "a@b.c is no URL?x=y"),
    ],
)
def test_urls_lose_user_and_query(text, shown):
    assert without_credentials(text) == shown


def test_all_texts_of_a_configuration_lose_them():
    given = {"a": ["https://u:p@h/x", 1, None, True], "b": {"c": "gs://b/x"}}
    assert hide_credentials(given) == {"a": ["https://h/x", 1, None, True], "b": {"c": "gs://b/x"}}


@pytest.mark.parametrize("unit", ["a", "://", "://a?", "://a@", "https://u:p@h?", "?", "://a#"])
def test_a_long_text_takes_no_long(unit):
    begin = time.process_time()
    without_credentials(unit * (1_000_000 // len(unit)))
    assert time.process_time() - begin < 5


SECRET = "sk-abcdef0123456789"


@pytest.mark.parametrize("name", ["MY_API_KEY", "HF_TOKEN", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "PROXY_AUTH"])
def test_a_text_has_no_value_of_a_variable_with_the_name_of_a_secret(monkeypatch, name):
    shown = f"401: {SECRET} of https://u:p@h/a?b=c"
    assert without_secrets(shown) == f"401: {SECRET} of https://h/a?…"
    monkeypatch.setenv(name, SECRET)
    assert without_secrets(shown) == "401: <redacted> of https://h/a?…"
    assert error_text(ValueError(shown)) == "ValueError: 401: <redacted> of https://h/a?…"


def test_an_error_whose_text_fails_is_logged_all_the_same(caplog):
    class Untold(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    log = get_logger("lockstep.of_a_test")
    log.warning("failed: %s", Untold(), exc_info=Untold())
    log.warning("failed: %r", KeyError("b"))
    assert "failed: <exception str() failed>" in caplog.text and "failed: KeyError('b')" in caplog.text
    assert error_text(Untold()) == "Untold: <exception str() failed>" and error_text(KeyboardInterrupt()) == (
        "KeyboardInterrupt"
    )


def test_an_error_is_cut_after_it_has_lost_its_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    for before in range(60):
        text = error_text(ValueError("x" * before + SECRET), 40)
        assert "sk-" not in text and len(text) <= 40


def test_names_that_are_those_of_no_secret_and_paths_stay(monkeypatch, tmp_path):
    path = str(tmp_path / "missing.json")
    for name, value in {
        "TOKENIZER": "org/model-name", "GOOGLE_APPLICATION_CREDENTIALS": path, "API_KEY": "EMPTY", "SSH_KEY": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    text = f"org/model-name: {path} was not found. EMPTY"
    assert without_secrets(text) == text


@pytest.fixture
def logged():
    handler, logger = logging.StreamHandler(io.StringIO()), get_logger("lockstep.test_printable")
    logger.addHandler(handler)
    yield logger, handler.stream
    logger.removeHandler(handler)


def test_no_log_line_has_them_nor_the_stack_of_an_error(logged, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    logger, stream = logged
    try:
        try:
            raise OSError("https://user:hush@h/a?sig=hush")
        except OSError as cause:
            raise ValueError(f"s3://key:hush@b {SECRET}\x1b[2J") from cause
    except ValueError as error:
        logger.error("%s at %s \x1b[2J", "gs://b/" + SECRET, "https://user:hush@h/b?sig=hush", exc_info=error)
        logger.exception("again")
    text = stream.getvalue()
    assert "hush" not in text and SECRET not in text and "\x1b" not in text
    assert text.startswith("gs://b/<redacted> at https://h/b?… \\x1b[2J\n")
    assert text.count("OSError: https://h/a?…\n") == 2 and text.count("ValueError: s3://b <redacted>\\x1b[2J\n") == 2


def test_a_full_disk_is_one_line_of_the_log(logged):
    logger, stream = logged
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows")
    except OSError as error:
        logger.error("the tracker failed", exc_info=error)
    assert stream.getvalue() == "the tracker failed\nOSError: [Errno 28] No space left on device: 'rows'\n"


def test_a_command_has_no_stack_of_orbax_for_a_full_disk(caplog):
    show_log(logging.INFO)
    error = ValueError("RESOURCE_EXHAUSTED: No space left on device")
    logging.getLogger("absl").error("a thread raised", exc_info=(type(error), error, None))
    assert caplog.records[-1].exc_text == "ValueError: RESOURCE_EXHAUSTED: No space left on device"


def test_an_error_has_no_lines_of_tensorstores_code():
    error = ValueError("no space [os_error_code='28'] [source locations='a.cc:336\nb.cc:19']")
    assert error_text(error) == "ValueError: no space [os_error_code='28']"


def test_every_module_logs_that_way():
    wrong = [
        name
        for name, text in sources("getLogger").items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and "getLogger" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
        and ast.unparse(node.args[0]) == "__name__"
    ]
    assert not wrong, f"get_logger of lockstep.printable hides credentials: {wrong}"


@pytest.mark.parametrize("configured", ["before", "after", "never"])
def test_the_log_of_a_command_is_shown_once_whoever_configures_the_root_logger(configured, monkeypatch, capsys):
    root, others = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(others)] if configured == "before" else [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    show_log(logging.INFO)
    if configured == "after":
        logging.basicConfig(stream=others, level=logging.ERROR)
    handlers, level = list(root.handlers), root.level
    log = get_logger("lockstep.training.loop")
    log.info("step %d", 3)
    log.debug("not shown")
    assert capsys.readouterr().err == "lockstep.training.loop: step 3\n" and others.getvalue() == ""
    assert (root.handlers, root.level) == (handlers, level)
    show_log(logging.WARNING)  # a second command in this process
    log.info("not shown")
    log.warning("shown once")
    assert capsys.readouterr().err == "lockstep.training.loop: shown once\n"


def test_an_import_leaves_the_root_logger_to_the_user(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    with pytest.raises(ImportError), keep_root_logger():
        logging.basicConfig(level=logging.ERROR)
        raise ImportError
    assert root.handlers == [] and root.level == logging.WARNING


SHOWING = """
import sys, rich
from lockstep.printable import write_to_stdout
for step in range(2000):
    write_to_stdout(lambda: rich.get_console().print(f"step {step} – loss ↵"))
    write_to_stdout(lambda: print(f"step {step} – of them all"))
with open(sys.argv[1], "w") as file:
    file.write(f"{step}")
"""


@pytest.mark.parametrize(
    "shell",
    [
        "PYTHONIOENCODING=latin-1 {program}",
        pytest.param("PYTHONIOENCODING=ascii {program} > {out}.log", marks=pytest.mark.slow),
        "{program} > /dev/full",
        pytest.param("{program} >&-", marks=pytest.mark.slow),
        "{{ {program}; echo $? > {out}.code; }} | head -1",
    ],
)
def test_what_stdout_cannot_take_ends_no_program(tmp_path, shell):
    out = tmp_path / "out"
    program = " ".join(map(shlex.quote, [sys.executable, "-c", SHOWING, str(out)]))
    done = subprocess.run(["bash", "-c", shell.format(program=program, out=shlex.quote(str(out)))], capture_output=True)
    code = tmp_path / "out.code"
    assert (int(code.read_text()) if code.exists() else done.returncode) == 0, done.stderr
    assert out.read_text() == "1999" and done.stderr.count(b"stdout cannot be written to") <= 1


WRITES = {
    "main/cli.py": "help and version, of which a reader may want the beginning alone",
    "main/help.py": "a script for a shell: half of it must not look like success",
    "main/prepare.py": "plan --json -, as above",
    "main/results.py": "tail, which ends with its reader",
    "report/tail.py": "tail, as above",
    "report/terminal_table.py": "a console that the caller gives",
    "plan/alternatives.py": "within what prepare.py gives to write_to_stdout",
    "plan/table.py": "as above",
    "check/run.py": "within what main/check.py gives to write_to_stdout",
    "training/data/example_check.py": "within what main/data.py gives to it",
    "launch/environment.py": "launch --dry-run, which is a script for a shell",
    "launch/gke.py": "as above, and launch status",
    "launch/machines.py": "as above",
    "launch/slurm.py": "as above",
    "launch/started_job.py": "as above",
    "launch/agent/main.py": "messages to the launcher",
    "launch/agent/supervisor.py": "as above",
    "testing/protocol.py": "messages to the test run",
    "testing/worker.py": "as above",
    "xla/compiler.py": "progress, which is shown on stderr",
    "printable.py": "write_to_stdout itself",
}
"""What writes to stdout by itself, and why an error of stdout may be one of the program there."""
CONSOLES = re.compile(r"(.*\.)?\w*(console|bar|live)(\(.*\))?\.(print|start|stop|update|log)", re.IGNORECASE)


def dotted(function):
    """What is called, as it is written: `ast.unparse` takes seconds for all calls of the package."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ast.unparse(function)


def stdout_calls(tree):
    """The calls that write to stdout outside what `write_to_stdout` is given, by their lines."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    guarded = set()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in calls:
        if getattr(node.func, "id", "") == "write_to_stdout":
            (work,) = node.args
            guarded |= set(ast.walk(functions.get(work.id, work) if isinstance(work, ast.Name) else work))
    for node in ast.walk(tree):  # a method that is handed on, too
        if getattr(node, "attr", "") == "flush" and ast.unparse(node) == "sys.stdout.flush":
            yield node.lineno
    for node in calls:
        if node in guarded:
            continue
        name = dotted(node.func)
        files = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "file"]
        if (
            name == "print"
            and files in ([], ["sys.stdout"])
            or name.startswith("sys.stdout.")
            or CONSOLES.fullmatch(name)
        ):
            yield node.lineno


def test_what_writes_to_stdout_is_in_the_table_or_goes_by_its_owner():
    files = sources("(?i)stdout|print|console|bar|live")
    lines_of = {name: lines for name, text in files.items() if (lines := list(stdout_calls(ast.parse(text))))}
    assert lines_of.keys() == WRITES.keys(), lines_of
