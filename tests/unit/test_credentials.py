"""What is hidden of names and URLs."""

import ast
import io
import logging
import time
from pathlib import Path

import pytest

import lockstep
from lockstep.credentials import SECRET_NAME, get_logger, hide_credentials, without_credentials


@pytest.mark.parametrize("name", ["HF_TOKEN", "HF_AUTH", "WANDB_PASSWD", "wandb_api_key", "AWS_SECRET", "CREDENTIALS"])
def test_secret_names(name):
    assert SECRET_NAME.search(name) and not SECRET_NAME.search("WANDB_MODE")


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


@pytest.fixture
def logged():
    handler, logger = logging.StreamHandler(io.StringIO()), get_logger("lockstep.test_credentials")
    logger.addHandler(handler)
    yield logger, handler.stream
    logger.removeHandler(handler)


def test_no_log_line_has_them_nor_the_stack_of_an_error(logged):
    logger, stream = logged
    try:
        try:
            raise OSError("https://user:hush@h/a?sig=hush")
        except OSError as cause:
            raise ValueError("s3://key:hush@b \x1b[2J") from cause
    except ValueError as error:
        logger.error("%s at %s \x1b[2J", "gs://b/a", "https://user:hush@h/b?sig=hush", exc_info=error)
        logger.exception("again")
    text = stream.getvalue()
    assert "hush" not in text and "\x1b" not in text
    assert text.startswith("gs://b/a at https://h/b?… \\x1b[2J\n")
    assert text.count("OSError: https://h/a?…\n") == 2 and text.count("ValueError: s3://b \\x1b[2J\n") == 2


def test_every_module_logs_that_way():
    package = Path(lockstep.__file__).parent
    wrong = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("getLogger")
        and ast.unparse(node.args[0]) == "__name__"
    ]
    assert not wrong, f"get_logger of lockstep.credentials hides credentials: {wrong}"
