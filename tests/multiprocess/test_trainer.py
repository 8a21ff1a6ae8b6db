"""The training loop on several real processes."""

import numpy as np
import pytest

from tests import tiny
from tests.multiprocess import test_training_untouched
from tests.multiprocess.harness import run_processes
from tests.unit.training.loop.test_profiler import steps_of

pytestmark = pytest.mark.multiprocess

STEPS = 4


def build(mesh_shape, hosts, **values):
    import haliax as hax

    from lockstep.models import LlamaConfig, LlamaLMHeadModel
    from lockstep.training import OptimizerConfig, TokenizedRows, Trainer, TrainerConfig, lm_loss

    model = LlamaConfig(max_seq_len=16, hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
    settings = {"num_train_steps": STEPS, "train_batch_size": 16, "mesh_shape": mesh_shape} | values
    config = TrainerConfig(**settings)
    trainer = Trainer(config, OptimizerConfig(learning_rate=1e-2).build(STEPS), lm_loss, hosts)
    rng = np.random.default_rng(0)
    mask = np.arange(16)[None, :] < rng.integers(2, 16, (32, 1))
    rows = TokenizedRows(columns={"tokens": rng.integers(0, 16, (32, 16)).astype(np.int32), "loss_mask": mask}, seed=0)
    Vocab = hax.Axis("vocab", 16)
    return trainer, trainer.init_model(lambda key: LlamaLMHeadModel.init(Vocab, model, key=key)), rows


def body_losses(hosts, mesh_shape, values):
    trainer, model, rows = build(mesh_shape, hosts, **values)
    losses = []
    trainer.add_hook(lambda info: losses.append(info.loss))
    trainer.train(model, rows)
    assert trainer.train_step_traces == 1
    return losses


def body_stop(hosts):
    """How a signal on one host stops all; and, before, the share of the parameters that each host holds."""
    import os
    import signal

    import jax

    trainer = tiny.make_trainer("auto", test_training_untouched.STEPS, hosts)  # its train step is compiled already
    model = tiny.init_model(trainer)
    leaves = jax.tree.leaves(model)
    local = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    share = local / sum(leaf.nbytes for leaf in leaves)
    if hosts.index == 1:
        trainer.add_hook(lambda info: os.kill(os.getpid(), signal.SIGTERM) if info.next_step == 3 else None)
    result = trainer.train(model, tiny.rows())
    return {"stopped": [result.completed_steps, result.stopped_by], "share": share}


@pytest.fixture(scope="module")
def stopped():
    return run_processes(body_stop, processes=2, devices=2)


@pytest.mark.slow
def test_losses_do_not_depend_on_processes_mesh_or_accumulation():
    (oracle,) = run_processes(body_losses, processes=1, devices=1, args=("auto", {}))
    for devices, mesh_shape, values in [
        (2, "host_local", {"per_device_parallelism": 2}),
        (4, "fsdp=2,cp=2,tp=2", {"per_device_parallelism": 1}),
    ]:
        by_process = run_processes(body_losses, devices=devices, args=(mesh_shape, values), timeout_s=300)
        assert all(losses == by_process[0] for losses in by_process), "hosts read different losses"
        np.testing.assert_allclose(by_process[0], oracle, rtol=1e-5)


@pytest.mark.slow
def test_a_signal_on_one_host_stops_all_after_the_same_step(stopped):
    assert [result["stopped"] for result in stopped] == [[4, 15], [4, 15]]


@pytest.mark.slow
def test_a_host_holds_only_its_part_of_the_parameters(stopped):
    for result in stopped:
        assert result["share"] == pytest.approx(0.5)


def body_traced(hosts, directory):
    from lockstep.training.loop.profiler import ProfilerConfig

    profiler = ProfilerConfig(start_step=1, num_steps=2, processes=None)
    trainer, model, rows = build("auto", hosts, log_dir=directory, run_id="run", profiler=profiler)
    trainer.train(model, rows)


@pytest.mark.slow
def test_all_hosts_are_in_one_profiler_trace(tmp_path):
    run_processes(body_traced, processes=2, devices=2, args=(str(tmp_path),))
    (trace,) = (tmp_path / "run" / "profiler" / "plugins" / "profile").iterdir()
    assert trace.name == "steps-2-3"
    files = sorted(trace.glob("*.xplane.pb"))
    assert [file.name for file in files] == ["process-000.xplane.pb", "process-001.xplane.pb"]
    for file in files:
        steps, names = steps_of(file)
        assert steps == {1, 2} and any("lockstep_train_step" in name for name in names)


def sampled(trainer, hosts):
    """Losses and samples of a run of four steps."""
    from lockstep.callback import InferenceEvalConfig, SampleCallback
    from tests import tiny
    from tests.multiprocess.test_training_untouched import PROMPTS
    from tests.rollouts import Recorder

    losses, tracker = [], Recorder("inference_eval/samples")
    trainer.add_hook(lambda info: losses.append(info.loss))
    config = InferenceEvalConfig(eval_every=2, prompts=PROMPTS, max_new_tokens=8, temperature=0.8, on_error="raise")
    trainer.add_hook(SampleCallback(config, tiny.tokenizer(), tracker=tracker, hosts=hosts))
    trainer.train(tiny.init_model(trainer), tiny.rows())
    return losses, [[row.step, row.prompt_id, row.generated_text] for row in tracker.rows]


def body_meshes(hosts, *shapes):
    from tests import tiny

    return [sampled(tiny.make_trainer(shape, STEPS, hosts), hosts) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["fsdp=2,cp=2", pytest.param("cp=4", marks=pytest.mark.nightly)])
def test_rows_split_over_two_hosts_have_the_losses_and_samples_of_whole_rows(shape):
    results = run_processes(body_meshes, processes=2, devices=2, args=("1,4,1", shape), timeout_s=300)
    for whole, (losses, texts) in results:
        np.testing.assert_allclose(losses, whole[0], rtol=1e-5)
        assert texts == whole[1] and len(losses) == STEPS
    assert len(results[0][0][1]) == 2 * 3
