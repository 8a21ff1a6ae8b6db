"""What our Levanter hook refuses when it is made, and where its tracker writes."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import haliax as hax
import jax
import jmp
import numpy as np
import pytest
import safetensors.numpy
from levanter.distributed import DistributedConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.schedule import ScheduleStep
from levanter.tokenizers import load_tokenizer
from levanter.tracker import CompositeTracker, NoopTracker
from levanter.tracker.background import BackgroundTracker
from levanter.tracker.wandb import WandbTracker

from lockstep.callback import InferenceEvalConfig
from lockstep.callback.evaluation import TasksConfig
from lockstep.errors import ConfigError, PeerError
from lockstep.levanter import LevanterTracker, sample_callback, start
from tests import tiny
from tests.unit.report.trackers.fakes import FakeRun, row


class Recorder(NoopTracker):
    def __init__(self):
        self.logged = []

    def log(self, metrics, *, step, commit=None):
        self.logged.append((step, dict(metrics)))


def trainer(tracker=None):
    hooks = []
    return SimpleNamespace(
        tracker=tracker or NoopTracker(),
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        add_hook=lambda fn, every=1: hooks.append((fn, every)),
        hooks=hooks,
    )


@pytest.mark.parametrize(("batch", "nearest"), [(16, 32), (40, 64)])
def test_a_batch_that_the_devices_cannot_share_is_refused_before_levanter_divides_by_zero(batch, nearest, monkeypatch):
    given = []
    monkeypatch.setattr("lockstep.levanter.start_hosts", given.append)
    config = SimpleNamespace(distributed=DistributedConfig("h:1", 8, 3), train_batch_size=batch, data_axis_size=32)
    with pytest.raises(ConfigError, match=f"is {batch}, .* over 32 devices. .* multiple of 32, such as {nearest},"):
        start(config)
    for fits in (64, -1, [ScheduleStep(0, 48)]):  # Levanter works the second out, and its text on the third is clear
        config.train_batch_size = fits
        start(config)
    assert config.distributed == DistributedConfig("h:1", 8, 3, initialize_jax_distributed=False)
    assert (given[0].coordinator_address, given[0].num_processes, given[0].process_id) == ("h:1", 8, 3)
    config.distributed = DistributedConfig(local_device_ids=[0])
    with pytest.raises(ConfigError, match=r"local_device_ids is \[0\]; set JAX_LOCAL_DEVICE_IDS"):
        start(config)


@pytest.mark.slow
def test_the_example_for_pods_trains_the_weights_of_the_checkpoint(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "llama3"
    for directory in (golden, tiny.TOKENIZER):
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = Path(__file__).parents[2] / "examples" / "levanter_train_lm.py"
    spec = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = LlamaConfig(hidden_dim=64, intermediate_dim=40, num_layers=2, num_heads=4, num_kv_heads=2)
    made = SimpleNamespace(mp=jmp.get_policy("p=f32,c=bfloat16"), parameter_axis_mapping={})
    config = SimpleNamespace(model=model, initialize_from_hf=str(tmp_path))
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        found = example.pretrained(config, made, load_tokenizer(str(tiny.TOKENIZER)))
    stored = safetensors.numpy.load_file(golden / "model.safetensors")
    head = np.asarray(found.lm_head.weight.rearrange((found.Vocab.name, ...)).array)
    assert head.dtype == np.float32
    np.testing.assert_array_equal(head, stored["lm_head.weight"].astype(np.float32))


def test_an_unsupported_model_is_refused_by_name_when_the_hook_is_made():
    config = Gpt2Config(num_layers=1, hidden_dim=32, num_heads=2)
    model = jax.eval_shape(lambda: config.build(hax.Axis("vocab", 64), key=jax.random.key(0)))
    with pytest.raises(PeerError, match="Gpt2LMHeadModel cannot be read; supported are Apertus"):
        sample_callback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer(), trainer(), model=model)


def test_processes_that_did_not_join_a_job_are_refused_when_the_hook_is_made(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.hosts.start"], "_hosts", None)
    monkeypatch.setenv("LOCKSTEP_NUM_PROCESSES", "2")
    with pytest.raises(ConfigError, match=r"2 processes were started .* lockstep\.levanter\.start\(trainer_config\)"):
        sample_callback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer(), trainer(), model=object())


def test_at_start_is_refused_for_there_is_no_such_hook():
    config = InferenceEvalConfig(prompts=["one"], at_start=True)
    with pytest.raises(ConfigError, match="at_start is true, but Levanter calls no hook"):
        sample_callback(config, tiny.tokenizer(), trainer())


def test_it_decodes_in_the_compute_dtype_and_checks_the_model_after_the_first_step():
    made = trainer()
    hook = sample_callback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer(), made)
    assert hook.sampler._session._make.args[0].dtype == "bfloat16"
    ((check, every),) = made.hooks
    assert every == 1
    with pytest.raises(PeerError, match="cannot be read"):
        check(SimpleNamespace(eval_model=object()))


def test_the_last_call_has_its_tasks_where_the_step_had_its_samples_in_their_turn():
    config = InferenceEvalConfig(prompts=["one"], tasks=TasksConfig(names=["task"], every=300))
    hook, asked = sample_callback(config, tiny.tokenizer(), trainer()), []
    hook.sampler._round = lambda step, model: asked.append(f"samples {step}")
    run = SimpleNamespace(run=lambda step, model: asked.append(f"tasks {step}") or True, wait=lambda limit_s: True)
    hook.sampler.tasks = run
    for step, force in ((70, False), (400, False), (400, True), (400, True)):
        hook.on_step(SimpleNamespace(next_step=step, eval_model=None, emit_event=lambda event: None), force=force)
    assert asked == ["samples 70", "samples 400", "tasks 400"], "Levanter's schedule decides"
    assert hook.sampler.config == config, "prompts_per_round deals by its eval_every"


def test_it_logs_at_levanters_step_to_every_tracker():
    one, two = Recorder(), Recorder()
    LevanterTracker(CompositeTracker([one, CompositeTracker([two])])).log({"a": 1.0}, step=5)
    assert one.logged == two.logged == [(4, {"a": 1.0})]
    LevanterTracker(one).log_rows("samples", [], step=5)
    assert len(one.logged) == 1  # a table is for W&B alone


@pytest.mark.parametrize("in_the_background", [False, True])
def test_a_round_that_levanters_wandb_tracker_would_refuse_goes_into_the_open_entry(in_the_background):
    run = FakeRun()
    theirs = WandbTracker(run)
    theirs.log({"train/loss": 2.0}, step=9)
    theirs.log({"late": 1.0}, step=4)
    assert len(run.logged) == 1, "Levanter's tracker drops it"
    ours = LevanterTracker(BackgroundTracker(theirs) if in_the_background else theirs)
    ours.log_rows("samples", [row(5, "text")], step=5)
    ours.log({"eval/step": 5, "eval/a": 1.0}, step=5)
    ours.alert(title="samples: loop", text="loop in 3 of 4 answers", step=5)
    assert run.alerts == [("samples: loop", "loop in 3 of 4 answers", "WARN")]
    assert [(step, list(values)) for step, values in run.logged[1:]] == [
        (9, ["samples", "samples_state"]),
        (9, ["eval/step", "eval/a"]),
    ]
    assert run.axes == [("eval/step", None), ("eval/*", "eval/step")]
