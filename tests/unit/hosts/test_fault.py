"""Which errors are faults of the machines, and when another attempt is no use."""

import pytest

from lockstep import errors
from lockstep.errors import is_fault
from lockstep.exits import FAILED, FAULT, FAULT_AGAIN
from lockstep.hosts import MemoryClient, fault
from lockstep.hosts.exchange import raise_if_any_failed
from lockstep.hosts.fault import failure_code, limit_attempts, note_saved

HALTED = (
    "INTERNAL: Core halted unexpectedly: INTERNAL: Accelerator device halted prematurely, perhaps due to an on-device "
    "check-failure."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("JaxRuntimeError: FAILED_PRECONDITION: The program continuator has halted unexpectedly.", True),
        (f"JaxRuntimeError: {HALTED}", True),
        ("JaxRuntimeError: INTERNAL: Uncorrectable ECC error in HBM", True),
        ("JaxRuntimeError: DEADLINE_EXCEEDED: barrier timed out", True),
        ("JaxRuntimeError: UNAVAILABLE: ICI link down on chip 3", True),
        ("JaxRuntimeError: UNKNOWN: slice health check failed", True),
        ("JaxRuntimeError: INTERNAL: TPU initialization failed: TPU_RET_CHECK failure", True),
        ("RuntimeError: Unable to initialize backend 'tpu': UNAVAILABLE: no /dev/accel0", True),
        ("HostError: the train step failed. The runtime says: DATA_LOSS: checksum of a transfer", True),
        ("HostError: the runtime says that the ICI is down", True),
        ("HostTimeoutError: barrier 'begin' timed out after 300 s", True),
        ("ServiceGoneError: the coordination service failed", True),
        ("ValueError: UNAVAILABLE: Error reading gs://bucket/data: HTTP 503", True),
        ("OSError: [Errno 5] Input/output error: '/mnt/disk'", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("requests.exceptions.ConnectTimeout: storage.googleapis.com", True),
        ("httpx.ConnectError: [Errno 111] Connection refused", True),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: 20 GiB", False),
        ("JaxRuntimeError: INVALID_ARGUMENT: Executable expected 3 arguments", False),
        ("JaxRuntimeError: UNIMPLEMENTED: no such operation", False),
        ("JaxRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel: not implemented", False),
        ("JaxRuntimeError: ABORTED: The TPU is already in use by process with pid 7", False),
        ("JaxRuntimeError: PERMISSION_DENIED: UNAVAILABLE: no", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ICI'", False),
        ("ValueError: an ICI of 3 axes is too small", False),
        ("KeyError: 'DEADLINE'", False),
    ],
)
def test_faults_are_told_from_mistakes_by_their_text(text, expected):
    assert is_fault(text) == expected


def test_an_error_of_all_is_a_fault_where_it_is_one_on_all_that_failed():
    def code(*texts: str | None) -> int:
        with pytest.raises(errors.PeerError) as caught:
            raise_if_any_failed("prepare", texts, None)
        return failure_code(caught.value)

    assert code(None, f"JaxRuntimeError: {HALTED}") == code(f"JaxRuntimeError: {HALTED}") == FAULT
    assert code(f"JaxRuntimeError: {HALTED}", "ValueError: no") == code("ConfigError: UNAVAILABLE: x") == FAILED


def test_what_lockstep_raises_on_purpose_is_no_fault_whatever_its_cause_says():
    wrapped = errors.ConfigError("the file is not there")
    wrapped.__cause__ = ConnectionResetError("gone")
    other = RuntimeError("the batch could not be read")
    other.__cause__ = ConnectionResetError("gone")
    assert failure_code(wrapped) == FAILED and failure_code(other) == FAULT
    assert failure_code(errors.HostTimeoutError("barrier")) == FAULT
    for kind in (errors.DivergenceError, errors.DisagreementError, errors.LaunchMismatchError):
        assert failure_code(kind("loss")) == FAILED


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("restarts", ["0", "1", "none"])
def test_a_second_fault_is_tried_again_only_where_something_was_saved_in_between(monkeypatch, capsys, saved, restarts):
    monkeypatch.setenv(fault.RESTARTS, restarts)
    first, second = MemoryClient.hub(2)
    if saved:
        note_saved(first)
    expected = FAULT_AGAIN if restarts == "1" and not saved else FAULT
    assert limit_attempts(second, FAULT) == expected
    assert ("attempt 2 has ended by a fault too" in capsys.readouterr().err) == (expected == FAULT_AGAIN)
