"""A GRPO run with drafts that is killed goes on bit for bit: what it drafts from decides which programs sample."""

import hashlib
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

from lockstep.engine.sizing.cost_model import Estimate
from lockstep.training import CheckpointerConfig
from tests import rollouts as runs
from tests import tiny
from tests.clock import until
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

STEPS, SAVED = 6, 4
"""Three rollouts see each question once, so from the fourth on there are answers to draft from."""


def body_run(hosts, directory, killed):
    """Loss and digest of the log-probabilities by step, from the beginning or from what is there; and the launches."""
    checkpoint = Path(directory) / f"run/checkpoints/step-{SAVED}/metadata.json"
    found = {}

    def after(info):
        columns = rollouts.rollout.columns
        digests = [hashlib.sha256(columns[name].tobytes()).hexdigest() for name in ("tokens", "rollout_logprobs")]
        found[info.next_step] = [float(info.loss).hex(), *digests]
        if killed and info.next_step == SAVED + 1:
            until(checkpoint.exists)
            if hosts.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    # Whatever is expected to be right is verified, as on a chip that is bound by its memory.
    with mock.patch.object(Estimate, "verify_cost", lambda self, width: 1.0):
        trainer, rollouts, model = runs.make(
            "auto", STEPS, hosts, run={"rollout": {"drafts": "auto"}},
            loss={"use_rollout_logprobs": False}, log_dir=directory, run_id="run",
            checkpointer=CheckpointerConfig(every=SAVED),
        )  # fmt: skip
        state = trainer.restore(tiny.init)
        trainer.add_hook(after)
        trainer.train(model if state is None else state, rollouts)
        rollouts.close()
    return found, sorted(rollouts.engine.ledger.launches)


def test_a_killed_run_with_drafts_goes_on_bit_for_bit(tmp_path):
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    (unbroken, launches), other = run_processes(body_run, processes=2, devices=2, args=(whole, False), timeout_s=300)
    assert other[0] == unbroken and any(name.startswith("verify_") for name in launches)
    with pytest.raises(AssertionError, match="process 1 failed, exit code 137, killed"):
        run_processes(body_run, processes=2, devices=2, args=(killed, True), timeout_s=300, own="it is killed")
    for found, _ in run_processes(body_run, processes=2, devices=2, args=(killed, False), timeout_s=300):
        assert found == {str(step): unbroken[str(step)] for step in range(SAVED + 1, STEPS + 1)}
