"""Checkpoints with a bit that is another one: every host goes on from the one before, or none."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from lockstep.errors import PeerError
from lockstep.training import CheckpointerConfig
from tests import tiny
from tests.faults.bodies import told
from tests.multiprocess.harness import run_processes
from tests.multiprocess.test_resume import STEPS, steps_in, train

pytestmark = pytest.mark.multiprocess

KINDS = {
    "data of process 0": "{arrays}/ocdbt.process_0/d/*",
    "data of process 1": "{arrays}/ocdbt.process_1/d/*",
    "index": "{arrays}/d/*",
    "manifest": "{arrays}/manifest.ocdbt",
    "names of the arrays": "{arrays}/_METADATA",
    "metadata": "metadata.json",
}
"""The files of a checkpoint by what is in them."""


def damage(checkpoint, kind):
    """Flip a bit of a file and return its path."""
    arrays = json.loads((Path(checkpoint) / "metadata.json").read_text())["arrays"]
    (file,) = Path(checkpoint).glob(KINDS[kind].format(arrays=arrays))
    data = bytearray(file.read_bytes())
    data[40] ^= 16
    file.write_bytes(data)
    return str(file)


def restore(hosts, directory, resume="auto"):
    """The step that a run goes on from, the error instead, and what was said."""
    values = {"checkpointer": CheckpointerConfig(every=2)}
    trainer = tiny.make_trainer("auto", STEPS, hosts, log_dir=str(directory), run_id="run", resume=resume, **values)
    with told() as log:
        try:
            trainer.restore(tiny.init)
        except PeerError as error:
            return None, str(error)
    return trainer.resumed_from.step, log.getvalue()


def body_damaged(hosts, directory):
    """The losses without a break; what each damaged file did; and the losses after the last of them."""
    plain, _, _ = train(hosts, directory)
    newest = f"{directory}/run/checkpoints/step-{STEPS}"
    found = {}
    for kind in KINDS:
        file = None
        if hosts.is_leader:
            shutil.copytree(newest, f"{directory}/whole")
            file = damage(newest, kind)
        hosts.barrier(f"damaged: {kind}")
        found[kind] = [file, *restore(hosts, directory), *restore(hosts, directory, "must")]
        hosts.barrier(f"read: {kind}")
        if hosts.is_leader and kind != "metadata":
            shutil.rmtree(newest)
            shutil.move(f"{directory}/whole", newest)
    with contextlib.suppress(PeerError):
        restore(hosts, directory)
    after, _, _ = train(hosts, directory)
    return {
        "plain": sorted(plain.items()),
        "after": sorted(after.items()),
        "found": found,
        "steps": steps_in(directory),
    }


def body_read(hosts, directory):
    """What one process finds of what two have written."""
    found = {}
    for kind in KINDS:
        shutil.copytree(f"{directory}/run", f"{directory}/{kind}/run")
        file = damage(f"{directory}/{kind}/run/checkpoints/step-{STEPS}", kind)
        found[kind] = [file, *restore(hosts, f"{directory}/{kind}")]
    return found


@pytest.mark.slow
def test_all_hosts_go_on_from_the_checkpoint_before_and_losses_are_those_without_a_break(tmp_path):
    results = run_processes(body_damaged, processes=2, devices=2, args=(str(tmp_path),), timeout_s=300)
    for kind in KINDS:
        for index, result in enumerate(results):
            file, step, log, refused, error = result["found"][kind]
            assert (step, refused) == (STEPS - 2, None), kind
            assert "newest checkpoint is damaged, and trainer.resume is must" in error
            if index == 0:
                assert file in log and file in error and "goes on from step 4 and not from a newer" in log
    for result in results:
        # The two steps are made again, their checkpoint replaces the damaged one.
        assert result["after"] == [each for each in result["plain"] if each[0] > STEPS - 2]
        assert len(result["after"]) == 2 and result["steps"] == [2, 4, 6]
    (elsewhere,) = run_processes(body_read, processes=1, devices=4, args=(str(tmp_path),))
    for kind, (file, step, log) in elsewhere.items():
        assert step == STEPS - 2 and file in log, kind
