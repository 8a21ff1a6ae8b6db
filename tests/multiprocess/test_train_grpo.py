"""GRPO on several hosts: the same rollouts and losses on every mesh, rewards shared, a run that is killed goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from lockstep.health import State
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from tests import rollouts as runs
from tests import tiny
from tests.adapters import save_base
from tests.multiprocess.harness import run_command, run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
FAILING_HOST = "LOCKSTEP_TEST_FAILING_HOST"
SLICES = "each host is a slice"


def opinion(row, prompt):
    """A reward that fails on one host."""
    if os.environ.get(FAILING_HOST):
        raise OSError("the judge is not reachable from here")
    return runs.parity(row, prompt)


def outcome(trainer, rollouts, spy):
    return {
        "found": spy.found,
        "losses": [float(loss).hex() for loss in spy.losses],
        "traces": [trainer.train_step_traces, *rollouts.logprob_traces.values()],
        "engine": {name: program.traces for name, program in rollouts.engine.programs.items()},
        "compilations": len(rollouts.engine.compilations),
    }


def body_meshes(hosts, mesh_shapes):
    """A rollout with two updates on each mesh, with a reference, a teacher, own log-probabilities and entropy."""
    loss = {"use_rollout_logprobs": False, "importance_cap": 2.0, "kl_coefficient": 0.05}
    loss |= {"kl_in_reward": True, "entropy_coefficient": 0.01, "teacher_coefficient": 0.5}
    results = []
    for mesh_shape in mesh_shapes:
        with pytest.MonkeyPatch.context() as patch:
            if mesh_shape == SLICES:
                patch.setenv("MEGASCALE_NUM_SLICES", str(hosts.count))
            shape = "auto" if mesh_shape == SLICES else mesh_shape
            trainer, rollouts, model = runs.make(shape, 2, hosts, loss=loss, run={"num_iterations": 2})
            assert ("dcn" in trainer.mesh.shape) == (mesh_shape == SLICES)
            spy = runs.train(trainer, rollouts, model)
        results.append(outcome(trainer, rollouts, spy))
    return results


def body_failing_reward(hosts):
    """The reward fails on process 1 alone: its answers get the default, on every host, and training goes on."""
    os.environ.pop(FAILING_HOST, None)
    if hosts.index == 1:
        os.environ[FAILING_HOST] = "1"
    try:
        tracker = runs.Recorder()
        rewards = [FunctionReward(function=f"{__name__}:opinion", default=-3.0), LengthReward(weight=0.5)]
        trainer, rollouts, model = runs.make("auto", 2, hosts, tracker=tracker, run={"rewards": rewards})
        with record_launches() as launches:
            spy = runs.train(trainer, rollouts, model)
        scalars = tracker.scalars.get(1, {})
        return {
            "advantage": spy.found[0]["advantage"],
            "failed": scalars.get("reward/opinion/failed"),
            "least": scalars.get("reward/min"),
            "losses": spy.losses,
            "launches": sorted(set(launches)),
        }
    finally:
        os.environ.pop(FAILING_HOST, None)


def body_experts(hosts):
    tracker = runs.Recorder()
    replayed = {"rollout": {"replay_routing": True}}
    trainer, rollouts, model = runs.make("auto", 2, hosts, tracker=tracker, run=replayed, model=runs.EXPERTS)
    losses = runs.train(trainer, rollouts, model).losses
    return losses, [values["train/routing_gap"] for step, values in tracker.scalars.items() if step in (1, 2)]


PACKED = {"loss": "gspo", "use_rollout_logprobs": False, "importance_cap": 2.0, "kl_coefficient": 0.05}


def body_packed(hosts):
    """One update of two minibatches' first, whose rows of 64 tokens have three answers each."""
    tracker = runs.Recorder()
    optimizer = optax.sgd(1.0)
    run = {"minibatches": 2, "rewards": [LengthReward(weight=-0.5), FunctionReward(function="tests.rollouts:parity")]}
    trainer, rollouts, model = runs.make(
        "auto", 2, hosts, tracker=tracker, loss=PACKED, run=run, optimizer=optimizer, row=64
    )
    spy = runs.train(trainer, rollouts, model)
    figures = {name: tracker.scalars.get(1, {}).get(f"train/{name}") for name in ("grad_norm", "kl", "logprob_gap")}
    return {
        "columns": spy.found[0],
        "loss": spy.losses[0],
        "figures": figures,
        "filled": rollouts.filled_rows,
        "traces": [trainer.train_step_traces, *rollouts.logprob_traces.values()],
    }


def body_padded(hosts, columns):
    """Loss and gradient of the first minibatch on one device, with one answer in each row."""
    trainer, rollouts, model = runs.make("auto", 2, hosts, loss=PACKED, run={"minibatches": 2}, row=64)
    rollouts.close()
    objective = runs.objective_of(runs.fields(), **PACKED)
    structs = objective.columns(64, on_policy=False)
    rows = {name: np.asarray(columns[name], one.dtype) for name, one in structs.items()}
    batch = {name: column[: runs.BATCH] for name, column in rows.items()}

    def mean_loss(model):
        parts = objective(model, batch)
        return parts.total / parts.weight, parts.metrics["kl"] / parts.weight

    with jax.set_mesh(trainer.mesh):
        (loss, kl), gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(model)
        logprobs = jax.jit(objective.answer_logprobs)(model, rows["tokens"])
    return {
        "loss": float(loss),
        "figures": {"grad_norm": float(optax.global_norm(gradient)), "kl": float(kl)},
        "logprobs": np.pad(np.asarray(logprobs), ((0, 0), (1, 0))).tolist(),
    }


ENDED_IN = {"step": 0}
"""The step whose rewards ask their process to end."""


def ending(row, prompt):
    """A reward in whose rollout the process is asked to end."""
    if row.step == ENDED_IN["step"]:
        ENDED_IN["step"] = 0
        os.kill(os.getpid(), signal.SIGTERM)
    return runs.parity(row, prompt)


def train_with_breaks(hosts, where, at=None):
    """Eight steps, two iterations of two minibatches each, that go on from what is at ``where``: losses and the end."""
    # Four sequences at a time, so that a rollout has several launches.
    run = {"num_iterations": 2, "minibatches": 2, "rollout": {"max_seqs": 4}, "sampling": "by_solve_rate"}
    run["rewards"] = [FunctionReward(function=f"{__name__}:ending"), LengthReward(weight=-0.5)]
    trainer, rollouts, model = runs.make(
        "auto", 8, hosts, run=run, loss={"use_rollout_logprobs": False}, log_dir=str(where), run_id="run",
        checkpointer=CheckpointerConfig(every=3, keep=KeepConfig(newest=9)),
    )  # fmt: skip
    state = trainer.restore(tiny.init)
    losses = {}
    trainer.add_hook(lambda info: losses.update({info.next_step: float(info.loss).hex()}))
    if at is not None:
        trainer.add_hook(lambda info: at(info))
    result = trainer.train(model if state is None else state, rollouts)
    return losses, [result.completed_steps, result.stopped_by, result.checkpoint_errors]


def body_resume(hosts, directory):
    """A run that ends in a rollout, goes on, ends between two updates of a rollout, and goes on; and one that goes on
    from the middle of the first rollout, as after a kill.
    """

    def train(where, at=None):
        return train_with_breaks(hosts, where, at)

    def terminate(info):
        if info.next_step == 5 and hosts.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    where = Path(directory) / "broken"
    ENDED_IN["step"] = 5 if hosts.index == 1 else 0
    first, in_rollout = train(where)
    second, between = train(where, terminate)
    hosts.barrier("before the copy")
    if hosts.is_leader:  # as a kill leaves it: the last checkpoint is that of step 3
        copy = Path(directory) / "killed" / "run"
        shutil.copytree(where / "run", copy)
        for step in (4, 6):
            shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    hosts.barrier("after the copy")
    third, _ = train(where)
    killed, _ = train(Path(directory) / "killed")
    return {"losses": [first, second, third, killed], "ends": [in_rollout, between]}


def body_unbroken(hosts, directory):
    """A run that nobody ends: from the beginning, or from what is there."""
    return train_with_breaks(hosts, directory)


def check_meshes(results, oracle, meshes):
    for one in results[1:]:
        for mine, leaders in zip(one, results[0], strict=True):
            assert mine["losses"] == leaders["losses"] and mine["found"] == leaders["found"]
    for run in results[0]:
        assert run["traces"] == [1, 1, 1, 1] and set(run["engine"].values()) == {1}
        assert run["compilations"] == len(run["engine"])
        runs.assert_close(run["found"]["0"], oracle["found"]["0"])
        np.testing.assert_allclose(
            float.fromhex(run["losses"][0]), float.fromhex(oracle["losses"][0]), rtol=1e-4, atol=1e-5
        )


@pytest.fixture(scope="module")
def oracle():
    ((found,),) = run_processes(body_meshes, processes=1, devices=1, args=(["auto"],), timeout_s=240)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [SLICES, pytest.param("1,2,2", marks=pytest.mark.nightly)], ids=str)
def test_the_first_step_is_the_same_on_every_mesh(mesh, oracle):
    results = run_processes(body_meshes, args=([mesh],), timeout_s=300)
    check_meshes(results, oracle, [mesh])


@pytest.mark.nightly
def test_the_first_step_is_the_same_on_four_processes(oracle):
    meshes = ["auto", "host_local", "2,2,2"]
    results = run_processes(body_meshes, processes=4, args=(meshes,), timeout_s=400)
    check_meshes(results, oracle, meshes)


@pytest.mark.slow
def test_packed_rows_are_learned_from_as_rows_of_one_answer():
    leader, other = run_processes(body_packed, timeout_s=240)
    assert leader["columns"] == other["columns"] and leader["loss"] == other["loss"]
    assert leader["filled"] == other["filled"] <= runs.BATCH / 2, "three answers in a row"
    assert set(leader["traces"]) == {1}
    (padded,) = run_processes(body_padded, processes=1, devices=1, args=(leader["columns"],), timeout_s=240)
    assert leader["loss"] == pytest.approx(padded["loss"], rel=1e-6, abs=1e-6)
    assert leader["figures"]["grad_norm"] == pytest.approx(padded["figures"]["grad_norm"], rel=1e-5) != 0
    assert leader["figures"]["kl"] == pytest.approx(padded["figures"]["kl"], abs=1e-6)
    mask = np.array(leader["columns"]["loss_mask"])
    for name in ("old_logprobs", "reference_logprobs"):  # of one model before the first update
        found = np.array(leader["columns"][name])
        np.testing.assert_allclose(found[mask], np.array(padded["logprobs"])[mask], rtol=1e-5, atol=1e-6)
        assert not found[~mask].any()


@pytest.mark.slow
def test_a_reward_that_fails_on_one_host_costs_its_answers_their_reward():
    leader, other = run_processes(body_failing_reward, timeout_s=200)
    assert leader["failed"] == runs.BATCH / 2 and leader["least"] <= -2.5
    assert leader["advantage"] == other["advantage"] and leader["losses"] == other["losses"]
    assert leader["launches"] == other["launches"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Losses by step of a run without a break."""
    directory = str(tmp_path_factory.mktemp("unbroken"))
    (losses, _), other = run_processes(body_unbroken, args=(directory,), timeout_s=200)
    assert other[0] == losses and sorted(losses) == [str(step) for step in range(1, 9)]
    return losses


@pytest.mark.slow
def test_a_run_that_ends_within_a_rollout_goes_on_bit_for_bit(tmp_path, unbroken):
    results = run_processes(body_resume, args=(str(tmp_path),), timeout_s=400)
    assert results[0] == results[1]
    assert results[0]["ends"] == [[4, signal.SIGTERM, 0], [6, signal.SIGTERM, 0]]
    first, second, third, killed = results[0]["losses"]
    # The step after which the second signal was seen had not called its hooks: the third start calls them first.
    assert ["".join(sorted(each)) for each in (first, second, third)] == ["1234", "5", "678"]
    assert first | second | third == unbroken
    assert killed == {step: unbroken[step] for step in "45678"}


def train_demo(directory, run_id, *arguments, config="config/grpo_demo.yaml"):
    """Train as the demo's configuration says on two hosts, a model that has learned nothing."""
    model = {"type": "llama", "max_seq_len": 256, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2}
    model |= {"num_heads": 4, "num_kv_heads": 2}
    command = ["lockstep", "train-grpo", "--config_path", str(config), "--initialize_from_hf", "null"]
    command += ["--model", json.dumps(model), "--trainer.log_dir", str(directory), "--trainer.run_id", run_id]
    command += ["--trainer.train_batch_size", "16", "--optimizer.warmup", "0", *arguments]
    run = run_command(command, cwd=ROOT, timeout_s=300)
    assert run.code == 0, run.output
    return run


@pytest.mark.nightly
def test_stages_have_the_losses_and_rollouts_of_a_mesh_without(tmp_path, monkeypatch):
    """Each stage is a slice; the log-probabilities of policy and reference are of both."""
    arguments = ["--trainer.num_train_steps", "3", "--trainer.per_device_parallelism", "2", "--hf_save_path", "null"]
    arguments += ["--kl_coefficient", "0.05", "--use_rollout_logprobs", "false", "--importance_cap", "2"]
    arguments += ["--num_iterations", "2", "--optimizer.learning_rate", "1e-3"]
    rewards = [{"type": "function", "function": "letters:even"}, {"type": "length", "weight": -0.5}]
    arguments += ["--rewards", json.dumps(rewards), "--inference_eval.enabled", "false"]
    config = Path(shutil.copy(ROOT / "config" / "grpo_demo.yaml", tmp_path))
    (tmp_path / "letters.py").write_text("def even(row, prompt):\n    return row.generated_text.count('e') % 2 == 0\n")
    found = {}
    for name, mesh_shape, slices in (("whole", "1,4,1", "1"), ("stages", "pp=2,fsdp=-1", "2")):
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
        train_demo(tmp_path, name, "--trainer.mesh_shape", mesh_shape, *arguments, config=config)
        metrics, rollouts = (
            [json.loads(line) for line in (tmp_path / name / f"{file}.jsonl").read_text().splitlines()]
            for file in ("metrics", "rollouts")
        )
        steps = [each for each in metrics if "train/loss" in each]
        found[name] = (
            [(each["train/loss"], each["train/grad_norm"]) for each in steps],
            [(each["step"], each["generated_text"], each["reward"]) for each in rollouts],
        )
        print(name, found[name])
    # A loss is a mean of advantages of about 1, of which the first of a rollout cancel out.
    np.testing.assert_allclose(found["stages"][0], found["whole"][0], rtol=1e-5, atol=1e-7)
    assert found["stages"][1] == found["whole"][1] and {step for step, *_ in found["whole"][1]} == {1, 3}


@pytest.mark.slow
def test_the_command_trains_evaluates_and_saves(tmp_path):
    """From a model that has learned nothing, for two steps, with a teacher of its vocabulary and a reward model."""
    save_base(str(tmp_path / "teacher"))
    shutil.copytree(ROOT / "tests" / "golden" / "reward_model", tmp_path / "judge")
    tiny.tokenizer().save_pretrained(tmp_path / "judge")
    judge = {"type": "model", "model": str(tmp_path / "judge"), "max_seq_len": 48, "weight": 0}
    arguments = ["--inference_eval.n_generations", "2", "--inference_eval.temperature", "1"]
    arguments += ["--teacher", str(tmp_path / "teacher"), "--teacher_coefficient", "0.5"]
    arguments += ["--rewards", json.dumps([{"type": "exact_match"}, judge])]
    run = train_demo(tmp_path, "run", "--trainer.num_train_steps", "2", *arguments)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = {}
    for line in lines:
        values.setdefault(line["step"], {}).update(line)
    assert values[1]["train/teacher_kl"] > 0, "the two are random models"
    assert values[1]["reward/model/mean"] != 0 == values[1]["reward/model/failed"]
    assert "reward/exact_match/mean" in values[1] and "time/train/step_avg_last10_s" in values[2]
    assert "inference_eval/pass@1/exact_match" in values[0] and "inference_eval/pass@2/exact_match" in values[0]
    assert values[1]["rollout/health/cut"] == values[1]["rollout/cut_share"]
    assert {f"rollout/health/{state}" for state in State} <= values[1].keys() & values[2].keys()
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert rows and all(("cut" in row["health"].split()) == (row["finish_reason"] == "length") for row in rows)
    assert (tmp_path / "run" / "checkpoint" / "config.json").exists()
    assert "done: 2 of 2 steps" in run.logs[0] and "reward 0.000" in run.logs[0]
    check_the_evaluation_on_gsm8k(tmp_path, tmp_path / "run" / "checkpoint")


def check_the_evaluation_on_gsm8k(directory, checkpoint):
    """The recipe of docs/grpo.md, for a model that knows nothing: from test questions to the share of right answers."""
    questions = [{"question": f"{n} hens lay {n} eggs each. How many?", "answer": f"#### {n * n}"} for n in (3, 4, 5)]
    (directory / "test.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    script = ["scripts/make_grpo_prompts.py", "--config_path", "config/grpo_gsm8k_qwen25_3b_v6e_8.yaml"]
    made = [str(directory / "test.jsonl"), str(directory / "prompts.jsonl")]
    subprocess.run([sys.executable, *script, *made], cwd=ROOT, check=True)
    command = ["lockstep", "sample", "--config_path", "config/sampler/gsm8k_qwen25_3b_v6e_8.yaml"]
    command += ["--hf_checkpoint", str(checkpoint), "--tokenizer", "null", "--prompts", made[1]]
    command += ["--trainer.log_dir", str(directory), "--trainer.tracker", "{type: jsonl}"]
    command += ["--engine.max_seq_len", "256", "--max_new_tokens", "16"]
    command += ["--trainer.distributed.require_process_count", "1"]
    run = run_command(command, cwd=ROOT, processes=1, timeout_s=200)
    assert run.code == 0, run.output
    logged = {}
    for line in (directory / "gsm8k-after" / "metrics.jsonl").read_text().splitlines():
        logged |= json.loads(line)
    rows = [
        json.loads(line) for line in (directory / "gsm8k-after" / "samples" / "samples.jsonl").read_text().splitlines()
    ]
    assert logged["sample/total_prompts"] == len(rows) == 3 and {row["gsm8k"] for row in rows} <= {0.0, 1.0}
    assert logged["sample/gsm8k"] == sum(row["gsm8k"] for row in rows) / 3
    assert all("write the final answer on the last line" in row["prompt"] for row in rows)


@pytest.mark.nightly  # in make slow: tests/unit/training/rl/test_rollouts.py
def test_experts_agree_and_are_replayed_on_two_processes():
    (losses, gaps), (others, _) = run_processes(body_experts, timeout_s=200)
    assert losses == others and gaps == [0.0, 0.0]
