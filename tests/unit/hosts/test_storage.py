"""Storage that does not answer: what is said, what is tried again, and how it ends."""

import itertools
import threading

import pytest

from lockstep.errors import HostTimeoutError
from lockstep.exits import FAULT
from lockstep.hosts import call_storage, storage, storage_wait
from lockstep.hosts.fault import failure_code
from tests.clock import until


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.01)


class HttpError(Exception):
    code = 503


class ClientConnectorError(Exception): ...


@pytest.mark.parametrize("error", [HttpError("busy"), ClientConnectorError("refused"), ConnectionResetError("gone")])
def test_what_passes_is_tried_again(error, caplog):
    errors = iter([error, error])

    def read():
        for failure in errors:
            raise failure
        return b"data"

    assert call_storage("reading gs://bucket/rows", read, timeout_s=60) == b"data"
    assert caplog.text.count("storage failed, the next try is in") == 2 and "gs://bucket/rows" in caplog.text


@pytest.mark.parametrize(
    "error", [FileNotFoundError("rows"), PermissionError("rows"), OSError("Forbidden"), ValueError()]
)
def test_what_another_try_meets_again_is_raised_at_once(error):
    calls = []

    def read():
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        call_storage("reading", read, timeout_s=60)
    assert len(calls) == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_where_storage_stays_away_the_end_names_it_and_has_a_code_that_is_retried(hangs):
    answers, calls = threading.Event(), itertools.count()

    def read():
        next(calls)
        if not hangs:
            raise ClientConnectorError("refused")
        answers.wait()

    with pytest.raises(HostTimeoutError, match="within 0.2 s: reading gs://bucket/rows; the last try: ") as caught:
        call_storage("reading gs://bucket/rows", read, timeout_s=0.2, try_s=0.05)
    answers.set()
    assert failure_code(caught.value) == FAULT and next(calls) > 1


def test_a_long_wait_is_said_and_said_again(monkeypatch, caplog):
    monkeypatch.setattr(storage, "LINE_S", 0.02)
    monkeypatch.setattr(storage, "REPEAT_S", 0.02)
    with storage_wait("reading gs://bucket/rows"):
        until(lambda: caplog.text.count("waiting for storage since") >= 2)
    assert "s): reading gs://bucket/rows" in caplog.text
    until(lambda: not any(thread.name == "lockstep-storage-wait" for thread in threading.enumerate()))
