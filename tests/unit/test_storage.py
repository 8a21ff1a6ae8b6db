"""Storage that does not answer: what is said, what is tried again, and how it ends."""

import importlib
import itertools
import re
import threading

import fsspec
import pytest

from lockstep import models, storage, text
from lockstep.errors import HostTimeoutError, LockstepError
from lockstep.exits import FAULT
from lockstep.hosts.fault import failure_code
from lockstep.placement import make_mesh
from lockstep.storage import call_storage, storage_wait
from lockstep.training import saved_model
from lockstep.training.data.records import list_files
from tests import fake_gcs, tiny
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


def test_work_of_any_length_is_done_once_while_storage_answers():
    ends, calls, answers = threading.Event(), itertools.count(), []

    def answer():
        answers.append(True)
        if len(answers) == 3:
            ends.set()
        return True

    def read():
        next(calls)
        ends.wait()
        return "read"

    assert call_storage("reading", read, timeout_s=0.05, answers=answer) == "read" and next(calls) == 1
    hangs = threading.Event()
    with pytest.raises(HostTimeoutError, match="no answer"):
        call_storage("reading", hangs.wait, timeout_s=0.05, answers=lambda: False)
    hangs.set()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    models.save_hf(tiny.init_model(tiny.make_trainer("auto", 1)), path, tokenizer=tiny.tokenizer())
    return path


@pytest.fixture
def bucket(monkeypatch, checkpoint):
    """A bucket with a checkpoint, its tokenizer, and prompts."""
    with fake_gcs.serve_here(monkeypatch) as bucket:
        for path in checkpoint.iterdir():
            bucket.objects[f"bucket/model/{path.name}"] = path.read_bytes()
        bucket.objects["bucket/prompts.jsonl"] = b'{"prompt": "What is 12 plus 7?"}\n'
        yield bucket


READS = {
    "the tokenizer": (text.fetch_tokenizer, "gs://bucket/model", 0),
    "the tokenizer, its second file": (text.fetch_tokenizer, "gs://bucket/model", 1),
    "the configuration": (models.read_hf_config, "gs://bucket/model", 0),
    "the headers": (models.fingerprint, "gs://bucket/model", 1),
    "the weights": (lambda url: models.load_hf(url, make_mesh("auto")), "gs://bucket/model", 5),
    "the prompts": (text.read_prompts, "gs://bucket/prompts.jsonl", 0),
}


@pytest.mark.parametrize(("read", "url", "downloads"), READS.values(), ids=READS)
@pytest.mark.parametrize("comes_back", [True, False])
def test_whatever_is_read_of_a_bucket_is_waited_for(bucket, monkeypatch, caplog, read, url, downloads, comes_back):
    monkeypatch.setattr(storage, "LINE_S", 0.05)
    monkeypatch.setattr(storage, "TRY_S", 0.1)
    monkeypatch.setattr(storage, "WAIT_S", 60.0 if comes_back else 0.4)
    bucket.stop_after(downloads)
    if comes_back:
        threading.Thread(target=lambda: (until(lambda: "next try" in caplog.text), bucket.answering.set())).start()
        assert read(url)
    else:
        with pytest.raises(HostTimeoutError, match=rf"within 0.4 s: \w+ {url}.*no answer") as caught:
            read(url)
        assert failure_code(caught.value) == FAULT
    assert re.search(rf"waiting for storage since .*: \w+ {url}", caplog.text)


class OfflineModeIsEnabled(ConnectionError): ...


class NoCredentialsError(Exception): ...


class ConnectError(Exception): ...


DOORS = {
    "a checkpoint": models.read_hf_config,
    "a run": saved_model,
    "a tokenizer": text.fetch_tokenizer,
    "data": lambda url: list_files(url, "data.train_urls"),
    "prompts": lambda url: text.read_prompts(f"{url}/prompts.jsonl"),
}


@pytest.mark.parametrize("read", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("failure", "fix"),
    [
        (OfflineModeIsEnabled("offline mode is enabled"), "Unset HF_HUB_OFFLINE, or give a local directory"),
        (NoCredentialsError("Unable to locate credentials"), r"set up access \(hf auth login, or HF_TOKEN\)"),
        (OSError("Forbidden: https://bucket"), "set up access"),
        (ImportError("Install adlfs"), "Install the package"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_where_storage_cannot_be_had_every_door_says_what_to_do(monkeypatch, read, failure, fix):
    def refuse(*arguments, **options):
        raise failure

    kind = type("Refusing", (fsspec.AbstractFileSystem,), {"protocol": "hf", "ls": refuse, "info": refuse})
    monkeypatch.setitem(vars(importlib.import_module("fsspec.registry"))["_registry"], "hf", kind)
    monkeypatch.setattr("etils.epath.backend.fsspec_backend.fs", lambda path: kind())
    with pytest.raises(LockstepError, match=rf"hf://org/model\S* cannot be read: {type(failure).__name__}: .*{fix}"):
        read("hf://org/model")


def test_without_a_network_the_first_wait_is_short(monkeypatch):
    monkeypatch.setattr(storage, "UNKNOWN_S", 0.02)
    monkeypatch.setattr(storage, "_answered", threading.Event())

    def read():
        raise ConnectError("[Errno -2] Name or service not known")

    with pytest.raises(HostTimeoutError, match="within 0.02 s: reading hf://org/model.*Check the disk, or the network"):
        call_storage("reading hf://org/model", read, timeout_s=60)
    call_storage("reading", lambda: b"data")
    with pytest.raises(HostTimeoutError, match="within 0.2 s"):  # a name that was known once comes back
        call_storage("reading hf://org/model", read, timeout_s=0.2)
