import dataclasses
import logging
import threading
import time

import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.report import background
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints import checkpointer as module
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory, DamagedCheckpointError
from lockstep.training.checkpoints.checkpointer import Checkpointer
from lockstep.training.checkpoints.config import KeepConfig
from tests.clock import until
from tests.multiprocess.harness import run_threads

STATE = {}
"""The state of these tests, in which what is written is not looked at."""


def make(path, hosts=None, **values):
    hosts = Hosts(*MemoryClient.hub(1)) if hosts is None else hosts
    options = {"facts": {"seed": "0"}, "run_config": {}, "reported": lambda: True}
    config = CheckpointerConfig(
        **{key: values.pop(key) for key in list(values) if key in ("every", "keep", "timeout_s")}
    )
    return Checkpointer(config, str(path), hosts, **(options | values))


@pytest.fixture(autouse=True)
def no_arrays(monkeypatch):
    """Nothing is written: what happens between the hosts is what is looked at."""
    monkeypatch.setattr(module, "write_arrays", lambda directory, arrays: lambda: None)
    monkeypatch.setattr(module, "merge_arrays", lambda directory: "0")
    monkeypatch.setattr(module, "read_arrays", lambda directory, structs, digest: {})


def save(checkpointer, *steps):
    for step in steps:
        checkpointer.save(STATE, step=step, loss=1.0, hooks={}, hooks_called=True)


def test_the_newest_stay_and_those_of_every_so_many_steps(tmp_path):
    checkpointer = make(tmp_path, keep=KeepConfig(newest=2, every=2000))
    save(checkpointer, 1000, 2000, 3000, 4000, 5000)
    checkpointer.wait()
    assert checkpointer.directory.steps() == [2000, 4000, 5000]
    assert checkpointer.last_step == 5000 and checkpointer.errors == 0


def test_a_step_is_saved_once(tmp_path):
    checkpointer = make(tmp_path)
    save(checkpointer, 3, 3)
    checkpointer.wait()
    (found,) = [each.name for each in checkpointer.directory.of(3).iterdir() if each.name.startswith("arrays-")]
    assert checkpointer.directory.metadata(3).arrays == found


def test_a_save_does_not_wait_for_its_writing(tmp_path, monkeypatch):
    written = threading.Event()
    monkeypatch.setattr(module, "write_arrays", lambda directory, arrays: written.wait)
    checkpointer = make(tmp_path)
    save(checkpointer, 1)
    assert checkpointer.directory.steps() == [], "it is still written"
    written.set()
    checkpointer.wait()
    assert checkpointer.directory.steps() == [1]


def test_a_host_that_cannot_write_fails_the_save_on_all_and_the_next_one_works(tmp_path, monkeypatch, caplog):
    broken = set()

    def write_arrays(directory, arrays):
        def wait():
            if "step-1" in str(directory) and threading.current_thread() in broken:
                raise OSError("no space left on device")

        return wait

    monkeypatch.setattr(module, "write_arrays", write_arrays)

    def body(hosts):
        checkpointer = make(tmp_path, hosts)
        original = checkpointer._write

        def write(save):
            if hosts.index == 1:
                broken.add(threading.current_thread())
            original(save)

        checkpointer._write = write
        save(checkpointer, 1, 2)
        checkpointer.wait()
        return checkpointer.errors, checkpointer.last_step

    with caplog.at_level(logging.ERROR):
        assert run_threads(body, 3) == [(1, 2)] * 3
    assert "the checkpoint of step 1 was not saved, training goes on: process 1: OSError: no space left" in caplog.text
    assert make(tmp_path).directory.steps() == [2]
    assert not make(tmp_path).directory.of(1).exists()


@pytest.mark.slow
def test_a_host_that_hangs_costs_the_save_and_nothing_else(tmp_path, monkeypatch, caplog):
    release = threading.Event()

    def body(hosts):
        checkpointer = make(tmp_path, hosts, timeout_s=8)
        original = checkpointer._write

        def write(save):
            if hosts.index == 1 and save.step == 1:
                save.copied.set()
                release.wait()
            else:
                original(save)

        checkpointer._write = write
        save(checkpointer, 1, 2)
        checkpointer.wait()
        return checkpointer.errors, checkpointer.last_step

    try:
        results = run_threads(body, 2)
    finally:
        release.set()
    assert results == [(1, 2)] * 2
    assert make(tmp_path).directory.steps() == [2]


def test_a_save_of_the_leader_that_hangs_is_given_up_and_counted(tmp_path, caplog):
    checkpointer, release = make(tmp_path, timeout_s=0.2), threading.Event()

    def write(save):
        save.copied.set()
        release.wait()

    checkpointer._write = write
    try:
        save(checkpointer, 1)
        checkpointer.wait()
    finally:
        release.set()
    assert checkpointer.errors == 1 and checkpointer.last_step is None
    assert "step 1 was not saved, training goes on: it was not complete after 0.2 s (checkpointer" in caplog.text


def test_old_checkpoints_that_cannot_be_removed_fail_no_save(tmp_path, monkeypatch, caplog):
    checkpointer = make(tmp_path, keep=KeepConfig(newest=1))

    def steps(self):
        raise OSError("cannot be listed")

    monkeypatch.setattr(module.CheckpointDirectory, "steps", steps)
    save(checkpointer, 1)
    checkpointer.wait()
    assert (checkpointer.errors, checkpointer.last_step) == (0, 1)
    assert "old checkpoints stay" in caplog.text


def test_a_checkpoint_counts_before_old_ones_are_removed_and_after_a_signal_nobody_waits_for_that(
    tmp_path, monkeypatch
):
    checkpointer, go = make(tmp_path, keep=KeepConfig(newest=1)), threading.Event()
    save(checkpointer, 1)
    checkpointer.wait()
    discard = checkpointer.directory.discard
    monkeypatch.setattr(checkpointer.directory, "discard", lambda step: (go.wait(10), discard(step)))
    save(checkpointer, 2)
    checkpointer.save_after_signal(STATE, step=3, loss=1.0, hooks={}, hooks_called=True)
    assert checkpointer.last_step == 2
    checkpointer.pending.done.wait(10)
    checkpointer.config = dataclasses.replace(checkpointer.config, timeout_s=1e-9)
    checkpointer.wait()
    assert (checkpointer.last_step, checkpointer.errors, checkpointer.directory.steps()) == (3, 0, [1, 2, 3])
    go.set()
    until(lambda: checkpointer.directory.steps() == [3])


def test_a_wait_for_the_save_before_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "SLOW_S", 0.01)
    monkeypatch.setattr(module, "write_arrays", lambda directory, arrays: lambda: time.sleep(0.1))
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 2)
    checkpointer.wait()
    assert "for the save before this one: raise checkpointer.every" in caplog.text


def test_a_directory_that_cannot_be_made_fails_the_save_on_all(tmp_path):
    def body(hosts):
        checkpointer = make(tmp_path / "base", hosts)
        (tmp_path / "base").touch()  # a file in the place of the directory
        save(checkpointer, 1)
        checkpointer.wait()
        return checkpointer.errors, checkpointer.last_step

    assert run_threads(body, 2) == [(1, None)] * 2


def test_what_was_reported_is_waited_for_before_a_checkpoint_counts(tmp_path):
    seen = []

    def reported():
        time.sleep(0.1)
        seen.append(checkpointer.directory.steps())
        return True

    checkpointer = make(tmp_path, reported=reported)
    save(checkpointer, 1)
    checkpointer.wait()
    assert seen == [[]] and checkpointer.directory.steps() == [1]


def test_reports_that_hang_hold_neither_training_nor_a_checkpoint_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(background, "TRAINING_WAIT_S", 0.05)
    monkeypatch.setattr(background, "REPORT_WAIT_S", 3600.0)
    monkeypatch.setattr(module, "SLOW_S", 60.0)
    hangs = threading.Event()

    def body(hosts):
        checkpointer = make(tmp_path, hosts, reported=hangs.wait)
        save(checkpointer, 1, 2, 3)
        checkpointer.wait()
        return checkpointer.last_step, checkpointer.errors

    try:
        results = run_threads(body, 2)
    finally:
        hangs.set()
    assert results == [(3, 0)] * 2
    assert make(tmp_path).directory.steps() == [2, 3]
    assert caplog.text.count("counts without all reports up to it") == 1
    assert "checkpoint of step 1 counts without" in caplog.text and "training waited" not in caplog.text


def test_after_a_signal_no_checkpoint_waits_for_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "TRAINING_WAIT_S", 3600.0)
    monkeypatch.setattr(background, "REPORT_WAIT_S", 3600.0)
    hangs = threading.Event()
    checkpointer = make(tmp_path, reported=hangs.wait)
    save(checkpointer, 1)
    with checkpointer.within_grace(2):
        save(checkpointer, 2)
        checkpointer.wait()
    hangs.set()
    assert checkpointer.directory.steps() == [1, 2]


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    first = make(tmp_path)
    save(first, 2, 4)
    first.wait()
    first.directory.begin(6)  # a process was killed while it wrote

    def find(hosts):
        checkpointer = make(tmp_path, hosts)
        found = checkpointer.find("auto")
        checkpointer._search.wait_removed(6, 10.0)  # on the leader; the others remove nothing
        return found.step

    assert run_threads(find, 2) == [4, 4]
    assert not first.directory.of(6).exists()


def test_a_save_waits_until_what_was_left_of_its_step_is_removed(tmp_path, monkeypatch):
    make(tmp_path).directory.begin(1)  # a process was killed while it wrote
    go, order = threading.Event(), []
    checkpointer = make(tmp_path)
    begin, remove = checkpointer.directory.begin, checkpointer.directory.discard
    monkeypatch.setattr(
        checkpointer.directory, "discard", lambda step: (go.wait(10), remove(step), order.append("removed"))
    )
    monkeypatch.setattr(checkpointer.directory, "begin", lambda step: (order.append("begun"), begin(step))[1])
    assert checkpointer.find("auto") is None
    threading.Timer(0.1, go.set).start()
    save(checkpointer, 1)
    checkpointer.wait()
    assert order == ["removed", "begun"] and checkpointer.directory.steps() == [1]


def test_what_cannot_be_removed_at_the_start_stops_nobody(tmp_path, monkeypatch, caplog):
    first = make(tmp_path)
    save(first, 2)
    first.wait()
    first.directory.begin(4)

    def remove(self, step):
        raise OSError("directory not empty")  # a process of the last attempt still writes

    monkeypatch.setattr(module.CheckpointDirectory, "remove", remove)
    second = make(tmp_path)
    assert second.find("auto").step == 2
    save(second, 4)
    second.wait()
    assert "step-4 cannot be removed: directory not empty" in caplog.text
    assert second.directory.steps() == [2, 4] and second.errors == 0


def test_there_may_must_or_must_not_be_one(tmp_path):
    assert make(tmp_path).find("auto") is None
    assert make(tmp_path).find("never") is None
    with pytest.raises(
        PeerError, match=r"trainer\.resume is must, but there is no checkpoint in .* Check trainer\.run_id"
    ):
        make(tmp_path).find("must")
    first = make(tmp_path)
    save(first, 2)
    first.wait()
    assert make(tmp_path).find("must").step == 2
    with pytest.raises(PeerError, match=r"trainer\.resume is never, but .* has a checkpoint of step 2"):
        make(tmp_path).find("never")


def test_hosts_that_do_not_share_the_directory_are_told(tmp_path):
    def body(hosts):
        with pytest.raises(PeerError, match="process 1: .*is not the one that process 0 sees"):
            make(tmp_path / str(hosts.index), hosts).find("auto")

    run_threads(body, 2)


def test_another_run_is_refused_and_what_differs_is_named(tmp_path):
    first = make(tmp_path, facts={"seed": "0", "training data": "abc"})
    save(first, 2)
    first.wait()
    second = make(tmp_path, facts={"seed": "1", "training data": "abc"})
    with pytest.raises(PeerError, match=r"cannot go on from .*step-2; they differ in\n\s+seed: 0 → 1 \(now\)"):
        second.restore(second.find("auto"), STATE)
    third = make(tmp_path, facts={"seed": "0", "training data": "abc"})
    assert third.restore(third.find("auto"), STATE)[0] == STATE
    assert third.last_step == 2


def test_reports_are_given_their_time_again_once_training_waits_no_more(tmp_path):
    checkpointer = make(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()
    assert checkpointer._reports._training_since is None


def restored(checkpointer, resume="auto"):
    """The step that a run goes on from, as `Trainer.restore` finds it."""
    while (metadata := checkpointer.find(resume)) is not None:
        if checkpointer.restore(metadata, STATE) is not None:
            return metadata.step
    return None


@pytest.fixture
def damage(monkeypatch):
    """The steps whose arrays the second process finds damaged; from a later save of the step on they are good."""
    steps = set()

    def read_arrays(directory, structs, digest):
        if directory.parent.name in steps and threading.current_thread().name == "reader-1":
            raise DamagedCheckpointError(f"{directory}/d/1 is damaged: Digest mismatch")
        return {}

    monkeypatch.setattr(module, "read_arrays", read_arrays)
    monkeypatch.setattr(module, "call_storage", lambda doing, work, *_, **__: work())  # in the thread of the process
    return steps


def test_what_one_host_finds_damaged_no_host_goes_on_from(tmp_path, caplog, damage):
    first = make(tmp_path)
    save(first, 2, 4)
    first.wait()
    damage.add("step-4")

    def body(hosts):
        threading.current_thread().name = f"reader-{hosts.index}"
        checkpointer = make(tmp_path, hosts)
        found = restored(checkpointer)
        return found, checkpointer.last_step

    assert run_threads(body, 2) == [(2, 2)] * 2
    assert "goes on from step 2 and not from a newer checkpoint, which is damaged and stays as it is" in caplog.text
    assert "process 1: " in caplog.text and "/d/1 is damaged: Digest mismatch" in caplog.text
    assert make(tmp_path).directory.steps() == [2, 4], "nothing is removed"

    def must(hosts):
        threading.current_thread().name = f"reader-{hosts.index}"
        with pytest.raises(PeerError, match=r"damaged, and trainer.resume is must:\n(.|\n)*go on from step 2, or"):
            restored(make(tmp_path, hosts), "must")

    run_threads(must, 2)


def test_a_damaged_checkpoint_is_none_of_the_newest_and_is_replaced_by_a_save_of_its_step(tmp_path, monkeypatch):
    first = make(tmp_path)
    save(first, 2, 4)
    first.wait()
    file = first.directory.of(4) / "metadata.json"
    file.write_bytes(file.read_bytes()[:-9])
    second = make(tmp_path)
    assert restored(second) == 2
    save(second, 3)
    second.wait()
    assert second.directory.steps() == [2, 3, 4], "two good ones are left"
    monkeypatch.setattr(module, "merge_arrays", lambda directory: 1 / 0)
    save(second, 4)
    second.wait()
    monkeypatch.setattr(module, "merge_arrays", lambda directory: "0")
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointDirectory, "commit", lambda *_: 1 / 0)
        save(second, 4)
        second.wait()
    assert (second.errors, second.directory.steps()) == (2, [2, 3, 4]), "a save that fails removes what it wrote alone"
    save(second, 4)
    second.wait()
    assert second.directory.steps() == [3, 4] and restored(make(tmp_path)) == 4
