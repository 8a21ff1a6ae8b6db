"""Which checkpoint a run goes on from: the newest that is whole, or an error that says why there is none."""

import errno
import json
import os
import threading

import pytest

from lockstep.errors import ConfigError
from lockstep.training.checkpoints.checkpoint import METADATA, CheckpointDirectory
from lockstep.training.checkpoints.search import SHARED_BY, CheckpointSearch
from tests.unit.training.checkpoints.test_checkpoint import complete


@pytest.fixture
def search(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    for step in (2, 4, 6):
        complete(directory, step)
    return CheckpointSearch(directory)


def damage(search, *steps):
    for step in steps:
        file = search.directory.of(step) / METADATA
        file.write_text(file.read_text().replace('"loss": 1.5', '"loss": 1.4'))


def found(search, resume="auto"):
    metadata = json.loads(search.run(resume))[1]
    return None if metadata is None else json.loads(metadata)["step"]


def test_what_interrupted_saves_have_left_is_removed_while_the_run_begins(search, monkeypatch):
    """A save of the same step waits for that: it would be removed too."""
    for step in (5, 7):
        search.directory.begin(step)
    go, remove, asked = threading.Event(), search.directory.discard, []
    monkeypatch.setattr(search.directory, "discard", lambda step: (asked.append(step), go.wait(10), remove(step)))
    assert found(search) == found(search) == 6, "nobody waits for the removal, and a second look begins none"
    search.wait_removed(6, 0.0)
    with pytest.raises(TimeoutError, match=r"step-7 was not removed within 0\.01 s"):
        search.wait_removed(7, 0.01)
    go.set()
    search.wait_removed(7, 10.0)
    assert search.directory.unfinished() == [] and asked == [5, 7]


@pytest.mark.parametrize("name", [METADATA, SHARED_BY])
def test_storage_that_fails_for_a_moment_costs_no_checkpoint(search, monkeypatch, name):
    stat, shared = os.stat, json.loads(search.run("auto"))[0]

    def fails(path, **options):
        if str(path).endswith(name):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return stat(path, **options)

    with monkeypatch.context() as broken, pytest.raises(OSError, match=f"Stale file handle: '/.*/{name}'"):
        broken.setattr(os, "stat", fails)
        search.run("auto") if name == METADATA else search.check_shared(shared)
    assert found(search) == 6 and search.directory.steps() == [2, 4, 6] and search._removed == {}


def test_the_newest_that_is_not_damaged_is_found(search, caplog):
    assert found(search) == 6 and not caplog.text
    search.damaged[6] = "process 3: d/1 is damaged"
    damage(search, 4)
    assert found(search) == 2
    assert "step 2 and not from a newer" in caplog.text
    assert "process 3: d/1 is damaged" in caplog.text and f"step-4/{METADATA} is damaged" in caplog.text


def test_a_damaged_one_that_is_not_the_newest_is_not_read(search, caplog):
    damage(search, 4)
    assert found(search, "must") == 6 and not caplog.text


def test_where_all_are_damaged_the_run_does_not_begin_anew(search):
    damage(search, 2, 4, 6)
    with pytest.raises(ConfigError, match=r"damaged, and there is no older one:\n(.*step-\d.*\n){3}Bring the files"):
        search.run("auto")
    assert search.directory.steps() == [2, 4, 6]


def test_must_needs_one(tmp_path):
    with pytest.raises(ConfigError, match=f"must, but there is no checkpoint in {tmp_path}. Check trainer.run_id"):
        CheckpointSearch(CheckpointDirectory(str(tmp_path))).run("must")


def test_must_is_the_newest(search):
    damage(search, 6)
    with pytest.raises(ConfigError, match=r"trainer.resume is must:\n.*\n.*use resume: auto to go on from step 4"):
        search.run("must")


def test_a_linked_checkpoint_is_another_runs(search, tmp_path):
    os.symlink(tmp_path, search.directory.path / "step-7")
    with pytest.raises(ConfigError, match="step-7 is a link"):
        search.run("auto")
