"""Our hook in real Levanter runs on real processes: losses, launches, tracker, schedule, its other hooks."""

import dataclasses
import functools
from pathlib import Path

import jax
import jmp
import levanter.tracker
import pytest
from levanter.callbacks import Callback
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.tracker import NoopConfig, NoopTracker, current_tracker

import lockstep.levanter
from lockstep.callback import InferenceEvalConfig
from lockstep.errors import LaunchMismatchError
from lockstep.hosts import leader_only
from lockstep.report import read_jsonl
from lockstep.text.tokenizer import decode
from lockstep.types import Request, SamplingParams
from tests import levanter_models as models
from tests import tiny, wandb_run
from tests.multiprocess import levanter_runs as runs
from tests.multiprocess import permuted
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

SETS = "Levanter sets logging, W&B and JAX up for the whole process"

STEPS, EVERY = 20, 5
SAMPLING = InferenceEvalConfig(
    prompts=["What is 12 plus 7?", "What is 40 in words?", "one"],
    max_new_tokens=8,
    temperature=0.8,
    n_generations=2,
    on_error="raise",
)
GREEDY = dataclasses.replace(SAMPLING, temperature=0.0, n_generations=1, stop_token_ids=[])
RUNS = {
    "fsdp": (runs.FSDP, models.LLAMA, SAMPLING),
    "tensor": (runs.TENSOR, models.LLAMA, SAMPLING),
    "qwen3_moe": (
        runs.FSDP,
        Qwen3MoeConfig(**models.SIZES, head_dim=8, moe_intermediate_dim=16, num_experts=5, num_experts_per_tok=3),
        GREEDY,
    ),
    "mixtral": (runs.FSDP, MixtralConfig(**models.SIZES, n_routed_experts=5, n_shared_experts=1), GREEDY),
    "snowball": (runs.snowball_mesh(data=-1), models.SNOWBALL, GREEDY),
    "snowball, split": (runs.snowball_mesh(context=2, data=1, expert=-1), models.SNOWBALL, GREEDY),
}


class NaiveTracker:
    """Logs as one would: through ``levanter.tracker.log``, which launches a program on all devices."""

    def log(self, metrics, *, step):
        levanter.tracker.log(metrics, step=step)

    def log_rows(self, name, rows, *, step):
        pass


def leader_logs_alone(hosts, mesh):
    """What ``levanter.tracker.log`` of the leader alone launches under the global mesh; whether our scope lets it."""
    refused = False
    with current_tracker(NoopTracker()), jax.set_mesh(mesh):
        with record_launches() as launches:
            if hosts.is_leader:
                levanter.tracker.log({"loss": 1.0}, step=1)
        if hosts.is_leader:
            try:
                with leader_only():
                    levanter.tracker.log({"loss": 1.0}, step=1)
            except LaunchMismatchError:
                refused = True
    return {"launches": launches, "refused": refused}


def body_same_losses(hosts, directory, run):
    found, (mesh, model, sampling) = {}, RUNS[run]
    runs.examples()
    for name in ("plain", "sampled"):
        losses, made = [], []

        def add_hooks(trainer, state, losses=losses, made=made, name=name):
            trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
            if name == "sampled":
                made.append(
                    lockstep.levanter.sample_callback(
                        sampling, tiny.tokenizer(), trainer, model=state.model, output_dir=directory
                    )
                )
                trainer.add_hook(made[0], every=EVERY)
                made.append(lockstep.levanter.sample_callback(SAMPLING, tiny.tokenizer(), trainer, name="naive"))
                made[1].sampler._reporter._tracker = NaiveTracker()
                trainer.add_hook(made[1], every=STEPS)

        tracker = {} if name == "sampled" else {"tracker": NoopConfig()}
        config = runs.trainer_config(
            Path(directory) / name, STEPS, mesh, use_explicit_mesh_axes=model.requires_explicit_mesh_axes, **tracker
        )
        with record_launches() as launches:
            ended = runs.train(config, add_hooks, model=model)
        found[name] = {"losses": losses, "launches": launches}
    sampler = made[0].sampler
    found["rounds"], found["report_errors"] = sampler.rounds, sampler.report_errors
    found["ledger"] = sampler.engine.ledger.launches
    found["naive"] = [made[1].sampler.rounds, made[1].sampler.report_errors]
    found["trap"] = leader_logs_alone(hosts, config.device_mesh)
    found["traces"] = {name: program.traces for name, program in sampler.engine.programs.items()}
    if sampling is GREEDY:
        found["reference"] = reference_texts(models.on_this_host(ended.eval_model), sampling)
    return found


def reference_texts(model, sampling):
    """Greedy answers by the forward pass of Levanter's model itself."""
    params = SamplingParams(max_new_tokens=sampling.max_new_tokens)
    tokens = [tuple(tiny.tokenizer().encode(prompt)) for prompt in sampling.prompts]
    requests = [Request(prompt_id=i, prompt_tokens=each, params=params) for i, each in enumerate(tokens)]
    return [decode(tiny.tokenizer(), answer.tokens) for answer in models.dense_completions(model, requests)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        "fsdp",
        *(
            pytest.param(run, marks=pytest.mark.nightly)
            for run in ("qwen3_moe", "tensor", "mixtral", "snowball", "snowball, split")
        ),
    ],
)
def test_a_run_with_samples_has_the_same_losses_and_launches(run, tmp_path):
    results = run_processes(body_same_losses, args=(str(tmp_path), run), timeout_s=800, own=SETS)
    for result in results:
        plain, sampled = result["plain"], result["sampled"]
        assert len(set(plain["losses"])) > STEPS // 2
        assert sampled["losses"] == plain["losses"]
        assert result["rounds"] == STEPS // EVERY
        assert set(result["traces"].values()) == {1}
    leader, other = results
    assert leader["report_errors"] == 0
    assert leader["sampled"]["losses"] == other["sampled"]["losses"]
    assert leader["ledger"] == other["ledger"] and "decode" in leader["ledger"]
    assert_same_launches(leader["plain"]["launches"], other["plain"]["launches"])
    assert_same_launches(leader["sampled"]["launches"], other["sampled"]["launches"])
    assert leader["trap"]["launches"] and leader["trap"]["refused"]
    with pytest.raises(AssertionError):
        assert_same_launches(leader["trap"]["launches"], other["trap"]["launches"])
    assert leader["naive"] == [1, 1] and other["naive"] == [1, 0]  # refused by the scope: no launch, one report error
    (logged,) = (tmp_path / "sampled").rglob("offline-run-*")
    increments = wandb_run.tables(logged, "inference_eval/samples")
    steps = [sorted({cells[table["columns"].index("step")] for cells in table["data"]}) for table in increments]
    rows = len(SAMPLING.prompts) * RUNS[run][2].n_generations
    assert steps == [[5], [10], [15], [20]] and all(len(table["data"]) == rows for table in increments)
    history = wandb_run.history(logged)
    reports = [values for _, values in history if "inference_eval/step" in values]
    assert [values["inference_eval/step"] for values in reports] == [5, 10, 15, 20]
    assert sum("train/loss" in values for _, values in history) == STEPS, "nothing of Levanter's own is lost"
    if "reference" in leader:
        last = [row["generated_text"] for row in read_jsonl(tmp_path / "samples.jsonl") if row["step"] == STEPS]
        assert last == leader["reference"] == other["reference"]


def assert_same_launches(one, two):
    assert one == two, [pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]][:5]


def body_report(hosts, directory):
    """A sampled run; what this process is by any count, and whether Levanter's W&B run is here."""
    made = []
    runs.examples()

    def add_hooks(trainer, state):
        made.append(
            lockstep.levanter.sample_callback(
                SAMPLING, tiny.tokenizer(), trainer, model=state.model, output_dir=directory
            )
        )
        trainer.add_hook(made[0], every=2)

    runs.train(runs.trainer_config(directory, 2, runs.FSDP), add_hooks)
    sampler = made[0].sampler
    return {
        "numbers": [hosts.client.task, hosts.index, jax.process_index()],
        "leader": hosts.is_leader,
        "tracked here": any(run.settings.mode == "offline" for run in runs_of(sampler)),
        "rounds": [sampler.rounds, sampler.report_errors],
        "launches": str(sampler.engine.ledger),
    }


def runs_of(sampler):
    """The W&B runs that the reports of a callback go to."""
    return [tracker._run for tracker in sampler._reporter._tracker._wandb if tracker._run is not None]


def body_permuted(hosts, directory):
    """What two tests look at: to import Levanter and to begin takes longer than their runs."""
    return {
        "reported": body_report(hosts, f"{directory}/reported"),
        "beside": body_beside_its_hooks(hosts, f"{directory}/beside"),
    }


@pytest.fixture(scope="module")
def permuted_hosts(tmp_path_factory):
    """Results and directory of runs whose processes the coordination service numbers in another order, as on a TPU."""
    directory = tmp_path_factory.mktemp("levanter")
    environment = {permuted.VARIABLE: "1,0"}
    return run_processes(body_permuted, args=(str(directory),), env=environment, own=SETS, timeout_s=600), directory


@pytest.mark.slow
def test_levanters_tracker_is_on_the_process_that_reports_whatever_the_service_calls_it(permuted_hosts):
    results, directory = permuted_hosts
    directory, results = directory / "reported", [result["reported"] for result in results]
    for process, result in enumerate(results):
        assert result["numbers"] == [1 - process, process, process]
        assert result["leader"] == result["tracked here"] == (process == 0)
        assert result["rounds"] == [1, 0]
        assert result["launches"] == results[0]["launches"]
    assert len(read_jsonl(directory / "samples.jsonl")) == 6
    (run,) = directory.rglob("offline-run-*")
    (table,) = wandb_run.tables(run, "inference_eval/samples")
    assert len(table["data"]) == 6


def body_beside_its_hooks(hosts, directory):
    """One run of 6 steps, and one that ends after 4 and is resumed; every hook at the same steps."""
    directory, found = Path(directory), {}
    for name, ends in (("whole", [6]), ("resumed", [4, 6])):
        losses, steps, checked = {}, [], []
        for end in ends:

            def add_hooks(trainer, state, losses=losses, steps=steps, checked=checked, name=name, end=end):
                trainer.add_eval_hook(ListAsyncDataset(runs.examples()[:16]))
                hook = lockstep.levanter.sample_callback(
                    SAMPLING, tiny.tokenizer(), trainer, output_dir=directory / name
                )
                trainer.add_hook(hook, every=2)
                trainer.add_hook(lambda info: losses.update({int(info.step): float(info.loss).hex()}))
                trainer.add_hook(lambda info: steps.append(hook.sampler.rounds), every=2)
                checked.append(int(state.step))

            config = runs.trainer_config(
                directory / name,
                end,
                runs.FSDP,
                tracker=NoopConfig(),
                steps_per_eval=2,
                max_eval_batches=1,
                mp=jmp.get_policy("p=f32,c=bfloat16"),
                checkpointer=CheckpointerConfig(
                    base_path=str(directory / name / "checkpoints"), save_interval=None, keep=[{"every": 1}]
                ),
            )
            ended = runs.train(config, add_hooks)
        found[name] = {"losses": [losses[step] for step in sorted(losses)], "rounds": steps, "started": checked}
        found[name]["last"] = int(ended.next_step)
    return found


@pytest.mark.slow
def test_it_runs_beside_evaluation_and_checkpoints_and_resumes(permuted_hosts):
    results, directory = permuted_hosts
    directory, results = directory / "beside", [result["beside"] for result in results]
    for result in results:
        assert result["whole"]["losses"] == result["resumed"]["losses"]
        assert len(result["whole"]["losses"]) == 6
        assert result["whole"]["rounds"] == [1, 2, 3, 3]  # the forced last call finds its step done
        assert result["resumed"]["rounds"] == [1, 2, 2, 1, 1]
        assert result["resumed"]["started"] == [0, 4]
    whole, resumed = (read_jsonl(directory / name / "samples.jsonl") for name in ("whole", "resumed"))
    assert whole == resumed
    assert [row["step"] for row in whole] == [2] * 6 + [4] * 6 + [6] * 6
    saved = {path.name for path in (directory / "whole" / "checkpoints" / "test").iterdir()}
    assert saved >= {"step-1", "step-3", "step-5"}, saved  # Levanter counts from 0


class Events(Callback):
    """Every progress event, as Levanter's watchdog sees it."""

    def __init__(self):
        self.seen = []

    def on_step(self, info, force=False):
        pass

    def on_event(self, event):
        self.seen.append(str(event))


def body_alone(hosts, directory, run):
    """Schedule, events and the averaged model, in one process that can compute Levanter's own answers."""
    found, (mesh, model, _) = {"rounds": {}, "same": []}, RUNS[run]
    for at_end in (True, False):
        events, directory_of = Events(), Path(directory) / f"{at_end}"

        def add_hooks(trainer, state, at_end=at_end, events=events, directory_of=directory_of):
            hook = lockstep.levanter.sample_callback(
                dataclasses.replace(GREEDY, at_end=at_end), tiny.tokenizer(), trainer, output_dir=directory_of
            )
            trainer.add_hook(hook, every=2)
            trainer.add_hook(events)
            if at_end:
                trainer.add_hook(functools.partial(compare, trainer=trainer, sampler=hook.sampler), every=4)

        def compare(info, trainer, sampler, directory_of=directory_of):
            assert sampler.flush()
            rows = [row for row in read_jsonl(directory_of / "samples.jsonl") if row["step"] == info.next_step]
            for model in (info.eval_model, info.model):
                texts = reference_texts(models.on_this_host(model), GREEDY)
                found["same"].append(texts == [row["generated_text"] for row in rows])

        settings = runs.trainer_config(
            directory_of,
            5,
            mesh,
            use_explicit_mesh_axes=model.requires_explicit_mesh_axes,
            tracker=NoopConfig(),
            model_averaging=EmaModelAveragingConfig(beta=0.99),
        )
        runs.train(settings, add_hooks, model=model, learning_rate=0.1)
        found["rounds"][str(at_end)] = sorted({row["step"] for row in read_jsonl(directory_of / "samples.jsonl")})
        found["events"] = [events.seen.count(name) for name in ("evaluation_started", "evaluation_finished")]
    return found


@pytest.fixture(scope="module", params=["fsdp", "snowball"])
def alone(request, tmp_path_factory):
    args = (str(tmp_path_factory.mktemp("alone")), request.param)
    (results,) = run_processes(body_alone, processes=1, devices=2, args=args, timeout_s=600, own=SETS)
    return results


@pytest.mark.nightly  # in make slow: samples beside evaluation, and unit/test_levanter.py
def test_schedule_events_and_the_averaged_model(alone):
    assert alone["rounds"] == {"True": [2, 4, 5], "False": [2, 4]}
    assert alone["events"] == [2, 2]
    assert alone["same"][0] and not alone["same"][1]  # the averaged model speaks, and the trained one says otherwise
