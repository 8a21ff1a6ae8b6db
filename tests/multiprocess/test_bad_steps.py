"""What one host's rows do to a step is the same on all: skipped, stopped or raised together."""

import math
import time

import pytest

from tests.multiprocess.harness import run_processes
from tests.multiprocess.launcher import OPTIMISED

pytestmark = pytest.mark.multiprocess

BAD = 2


def train(hosts, steps, bad, **values):
    """Losses, the result and the launches of a run; at step ``bad`` the last row of the last host is not a number."""
    from lockstep.training import OptimizerConfig, Trainer, TrainerConfig
    from tests.multiprocess.launches import record_launches
    from tests.unit.training.bigrams import Bigrams
    from tests.unit.training.loop.test_stopping import Poisoned, loss

    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant", ema_decay=0.5)
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, **values)
    trainer = Trainer(config, optimizer.build(steps), loss, hosts, schedule=optimizer.schedule(steps))
    losses = []
    trainer.add_hook(lambda info: losses.append(info.loss))
    model = trainer.init_model(Bigrams.init)
    with record_launches() as launches:
        result = trainer.train(model, Poisoned({} if bad is None else {bad: math.nan}))
    assert trainer.train_step_traces == 1
    return losses, result, launches


def body(hosts, path):
    from lockstep.errors import DivergenceError
    from lockstep.training import CheckpointerConfig
    from lockstep.training.checkpoints import checkpointer
    from lockstep.training.checkpoints.checkpoint import CheckpointDirectory

    write = checkpointer.write_arrays

    def slow(directory, arrays):
        wait = write(directory, arrays)
        return lambda: (time.sleep(1.0), wait())

    plain, _, _ = train(hosts, 4, None)
    losses, skipped, launches = train(hosts, 5, BAD, on_nan="skip", per_device_parallelism="auto")
    assert math.isnan(losses[BAD]) and [*losses[:BAD], *losses[BAD + 1 :]] == plain
    _, stopped, _ = train(hosts, 5, BAD, on_nan="stop")
    checkpointer.write_arrays = slow
    try:
        train(hosts, 5, BAD, checkpointer=CheckpointerConfig(every=BAD), log_dir=path, run_id="run")
    except DivergenceError as error:
        raised = str(error)
        saved = CheckpointDirectory(f"{path}/run/checkpoints").steps()
    return {
        "losses": plain,
        "skipped": [skipped.completed_steps, skipped.skipped_steps],
        "stopped": [stopped.completed_steps, stopped.diverged],
        "raised": raised,
        "saved": saved,
        "launches": launches,
    }


@pytest.mark.slow
def test_a_bad_row_on_one_host_is_a_bad_step_on_all(tmp_path):
    # bits of two programs
    first, *others = run_processes(body, processes=2, devices=2, args=(str(tmp_path),), env=OPTIMISED)
    assert all(other == first for other in others)
    assert first["skipped"] == [5, 1] and first["stopped"] == [BAD + 1, True]
    assert first["raised"].startswith("step 3 has loss nan and gradient norm nan")
    assert first["saved"] == [BAD], "the checkpoint that was being written then is complete"
