"""The thread that writes a host's files."""

import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.errors import HostTimeoutError
from lockstep.hosts import Stopped
from lockstep.models import skeleton
from lockstep.models.hf import save_writer
from lockstep.models.hf.save_target import save_target
from lockstep.models.hf.save_writer import FileWriter, Handover
from lockstep.models.hf.saved_tensor import saved_tensors, split_into_files
from tests import tiny

TENSORS = saved_tensors(skeleton(12, tiny.CONFIG), None, 12)


def zeros(tensor, start, stop):
    return np.zeros((tensor.shape[0] * (stop - start) // tensor.rows, *tensor.shape[1:]), np.float32)


@pytest.fixture
def target(tmp_path):
    target = save_target(tmp_path / "out", "a")
    target.begin()
    return target


def write(target, read, seconds=20.0, timeout_s=60.0):
    files = split_into_files(TENSORS, 20_000, 1)
    with FileWriter(target, files, read, timeout_s) as writer:
        done = writer.wait(seconds)
    return writer, done


def test_all_files_are_written_in_pieces(target, tmp_path, monkeypatch):
    monkeypatch.setattr(save_writer, "PIECE_BYTES", 1000)
    calls = []
    writer, done = write(target, lambda *piece: (calls.append(piece), zeros(*piece))[1])
    assert done and writer.written == writer.nbytes == sum(tensor.nbytes for tensor in TENSORS)
    assert len(calls) > 2 * len(TENSORS)
    found = {name: each for file in tmp_path.glob(".out*/*") for name, each in load_file(file).items()}
    assert {name: each.shape for name, each in found.items()} == {each.name: each.shape for each in TENSORS}


def test_what_fails_in_the_thread_is_raised(target):
    def read(tensor, start, stop):
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write(target, read)


def test_nothing_is_written_after_the_context(target):
    begun, calls = threading.Event(), []

    def read(*piece):
        calls.append(piece)
        begun.set()
        time.sleep(0.05)  # several pieces are left when the context ends
        return zeros(*piece)

    with FileWriter(target, split_into_files(TENSORS, 20_000, 1), read, 60.0):
        begun.wait()
    assert "lockstep-save" not in {thread.name for thread in threading.enumerate()}
    assert len(calls) < len(TENSORS)


def test_a_disk_that_hangs_is_named(target, monkeypatch):
    monkeypatch.setattr("lockstep.hosts.own_work.STOP_S", 0.05)
    release = threading.Event()
    try:
        with pytest.raises(HostTimeoutError, match=r"nothing of the checkpoint was written for 0\.1 s"):
            write(target, lambda *_: release.wait() or np.zeros(1), seconds=0.2, timeout_s=0.1)
    finally:
        release.set()


def test_two_pieces_wait_at_most_and_a_closed_handover_stops_the_thread():
    handover = Handover()
    for _ in range(2):
        assert handover.has_room(0.0)
        handover.put(object())
    assert not handover.has_room(0.01)
    handover.close()
    with pytest.raises(Stopped):
        handover.take(TENSORS[0], 0, 1)
