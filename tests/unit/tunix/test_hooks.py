"""Our hooks in Tunix's own training loop: which rounds, on what, where the samples go; training is untouched."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from flax import nnx
from metrax.logging import WandbBackend
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.hooks import TrainingHooks
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.errors import ConfigError, PeerError
from lockstep.report import read_jsonl
from lockstep.tunix import sample_hooks
from lockstep.tunix.hooks import TunixTracker
from tests import tiny
from tests import tunix_models as models
from tests.unit.report.trackers.fakes import FakeRun, row


class Line(nnx.Module):
    """Trains in no time."""

    def __init__(self):
        self.slope = nnx.Param(np.zeros(4, np.float32))


@pytest.fixture
def rounds(monkeypatch):
    """The steps of the rounds that would run."""
    found = []
    monkeypatch.setattr(SampleCallback, "_round", lambda self, step, model: found.append(step))
    monkeypatch.setattr(SampleCallback, "check", lambda self, model: None)
    return found


def line_trainer(hooks, *, steps=None, **values):
    trainer = PeftTrainer(Line(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=100, max_steps=steps, **values))
    trainer = trainer.with_loss_fn(lambda model, input_tokens, **_: ((model.slope[...] - input_tokens) ** 2).mean())
    trainer = trainer.with_gen_model_input_fn(lambda batch: {"input_tokens": batch.input_tokens})
    trainer.with_training_hooks(hooks)
    return trainer


def line_batches(count):
    return [TrainingInput(input_tokens=np.full(4, step, np.float32), input_mask=None) for step in range(count)]


def config(**values):
    return InferenceEvalConfig(**{"prompts": ["one"], "max_new_tokens": 4, "on_error": "raise"} | values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eval_every": 3}, [3, 6, 7]),
        ({"eval_every": 3, "at_end": False}, [3, 6]),
        ({"eval_every": 1, "at_start": True}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"eval_every": 7}, [7]),
        ({"eval_every": 100, "at_start": True}, [0, 7]),
        ({"eval_every": 100, "enabled": False}, []),
    ],
)
def test_rounds_are_those_that_the_configuration_says(rounds, values, expected):
    line_trainer(sample_hooks(config(**values), tiny.tokenizer())).train(line_batches(7))
    assert rounds == expected


def test_a_step_is_an_update_not_an_iteration(rounds):
    hooks = sample_hooks(config(eval_every=2, at_start=True), tiny.tokenizer())
    line_trainer(hooks, gradient_accumulation_steps=3).train(line_batches(15))
    assert rounds == [0, 2, 4, 5]


def test_a_run_of_max_steps_ends_with_its_last_step(rounds):
    line_trainer(sample_hooks(config(eval_every=2), tiny.tokenizer()), steps=5).train(line_batches(50))
    assert rounds == [2, 4, 5]


def test_a_run_that_is_trained_from_outside_has_the_same_rounds(rounds):
    """RL learners train the actor a micro-batch at a time, and close it once."""
    trainer = line_trainer(sample_hooks(config(eval_every=2, at_start=True), tiny.tokenizer()))
    trainer.is_managed_externally = True
    for batch in line_batches(5):
        trainer.train([batch])
    assert rounds == [0, 2, 4]
    trainer.close()
    assert rounds == [0, 2, 4, 5]


def test_a_resumed_run_goes_on_with_the_next_round(rounds, tmp_path):
    def run(steps):
        hooks = sample_hooks(config(eval_every=2, at_start=True), tiny.tokenizer())
        trainer = line_trainer(hooks, steps=steps, checkpoint_root_directory=str(tmp_path))
        trainer.train(line_batches(steps))
        return trainer.train_steps

    assert run(4) == 4 and rounds == [0, 2, 4]
    assert run(7) == 7 and rounds == [0, 2, 4, 6, 7]
    assert run(7) == 7 and rounds == [0, 2, 4, 6, 7], "nothing was trained"


class Told(TrainingHooks):
    """Writes down what it is told."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, train_ctx):
        self.calls.append("start")

    def on_train_end(self, train_ctx):
        self.calls.append("end")

    def on_train_step_start(self, train_ctx):
        self.calls.append(f"begin {train_ctx.train_steps}")

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.calls.append(f"step {train_step}")

    def on_eval_step_start(self, train_ctx):
        self.calls.append("eval")

    def on_eval_step_end(self, train_ctx, eval_loss):
        self.calls.append("evaluated")


def test_the_users_hooks_get_every_call(rounds):
    alone, beside = Told(), Told()
    for hooks in (alone, sample_hooks(config(eval_every=1), tiny.tokenizer(), also=beside)):
        line_trainer(hooks).train(line_batches(3), line_batches(1))
    assert alone.calls == beside.calls and len(set(alone.calls)) > 6
    assert rounds == [1, 2, 3]


def test_processes_that_did_not_join_a_job_are_refused_when_training_begins(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.hosts.start"], "_hosts", None)
    monkeypatch.setenv("LOCKSTEP_NUM_PROCESSES", "2")
    line = line_trainer(sample_hooks(config(), tiny.tokenizer()))
    with pytest.raises(ConfigError, match=r"2 processes were started .* Call lockstep\.start\(\)"):
        line.train(line_batches(1))


def test_what_cannot_be_read_is_refused_when_the_hooks_are_made():
    model = models.gemma3_model(tiny.vocab_size())
    model.vision_encoder = nnx.data(nnx.Module())
    with pytest.raises(PeerError, match="Tunix's Gemma3 cannot be read.*vision tower.*docs/tunix.md"):
        sample_hooks(config(), tiny.tokenizer(), model=model)
    with pytest.raises(PeerError, match="Tunix's Gemma3 cannot be read"):
        line = line_trainer(sample_hooks(config(), tiny.tokenizer()))
        line.model = model
        line.training_hooks.on_train_start(line)


def test_a_tokenizer_of_another_kind_is_refused():
    class Pieces:
        encode = decode = bos_id = eos_id = pad_id = None

    assert sample_hooks(config(), TokenizerAdapter(tiny.tokenizer()))
    with pytest.raises(ConfigError, match="the tokenizer is a Pieces; lockstep needs one of Hugging Face"):
        sample_hooks(config(), TokenizerAdapter(Pieces()))


def train(directory, hooks_of):
    """A real run of a small Qwen3 on 2 × 2 devices: the trainer, its losses, and what a backend of its logger got."""
    mesh, backend = models.mesh(2, 2), Backend()
    model = models.randomise(models.MODELS["qwen3"](tiny.vocab_size()), mesh)
    settings = TrainingConfig(
        eval_every_n_steps=100,
        metrics_logging_options=MetricsLoggerOptions(
            str(directory), backend_kwargs={"custom_backend": [lambda: backend]}
        ),
    )
    trainer = PeftTrainer(model, optax.adam(3e-2), settings).with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": np.broadcast_to(np.arange(16), (8, 16)),
            "attention_mask": np.broadcast_to(np.tril(np.ones((16, 16), bool)), (8, 16, 16)),
        }
    )
    trainer.with_training_hooks(hooks_of(model))
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, tiny.vocab_size(), (8, 16)).astype(np.int32) for _ in range(4)]
    with mesh:
        trainer.train([TrainingInput(input_tokens=each, input_mask=np.ones_like(each)) for each in rows])
    losses = [float(loss).hex() for loss in trainer.metrics_logger.get_metric_history("", "loss", "train")]
    return trainer, losses, backend.logged


class Backend:
    def __init__(self):
        self.logged = []

    def log_scalar(self, event, value, **kwargs):
        self.logged.append((event, float(value), kwargs.get("step")))

    def close(self):
        pass


@pytest.mark.slow
def test_a_real_run_samples_the_model_that_is_trained_and_trains_the_same(tmp_path):
    asked = config(prompts=["What is 12 plus 7?", "one"], eval_every=2, at_start=True, max_new_tokens=8)
    gaps = {}

    class Compare(Told):
        """Compares the answers of a round with the trainer's model, before it changes."""

        def on_train_step_start(self, trainer):
            step, prompts, answers = reports[-1]
            if step == trainer.train_steps:
                gaps[step] = models.gap(
                    trainer.model, [tiny.tokenizer().encode(each.text) for each in prompts], answers
                )

        on_train_end = on_train_step_start

    reports = []

    def hooks_of(model):
        hooks = sample_hooks(asked, tiny.tokenizer(), model=model, output_dir=tmp_path, also=Compare())
        report = hooks.sampler._reporter.report

        def noted(step, prompts, result, counts, requests):
            reports.append((step, prompts, result.completions))
            report(step, prompts, result, counts, requests)

        hooks.sampler._reporter.report = noted
        return hooks

    _, plain, _ = train(tmp_path, lambda model: None)
    trainer, sampled, logged = train(tmp_path, hooks_of)
    assert sampled == plain and len(plain) == 4
    assert sorted(gaps) == [0, 2, 4]
    assert all(each.logprob < 1e-5 and each.greedy < 1e-5 for each in gaps.values()), gaps
    assert [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [0, 0, 2, 2, 4, 4]
    history = trainer.metrics_logger.get_metric_history("inference_eval", "num_completions", "eval")
    assert list(history) == [2, 2, 2]
    assert [step for event, _, step in logged if event == "inference_eval/eval/num_completions"] == [0, 2, 4]


class LoggerBackend:
    """Gets every scalar of jax too, such as times of compiling."""

    def __init__(self):
        self.logged = []

    def log_scalar(self, event, value, **kwargs):
        if not event.startswith("/jax/"):
            self.logged.append((event, value, kwargs["step"]))

    def close(self):
        pass


def wandb_backend(run):
    """Tunix's W&B backend with a run that is already there; only what we log counts here."""
    backend = WandbBackend.__new__(WandbBackend)
    backend._is_active, backend.wandb = True, SimpleNamespace(run=run, log=lambda *_, **__: None, finish=run.finish)
    return backend


@contextlib.contextmanager
def tracker(*backends):
    """Our tracker and a logger with these backends, which listen to jax until it is closed."""
    made = TunixTracker()
    factories = [lambda backend=backend: backend for backend in backends]
    logger = MetricsLogger(MetricsLoggerOptions("unused", backend_kwargs={"custom_backend": factories}))
    made.use(logger)
    try:
        yield made, logger
    finally:
        logger.close()


def test_the_logger_gets_scalars_at_their_step_and_keeps_them():
    backend = LoggerBackend()
    with tracker(backend) as (made, logger):
        made.log({"eval/time/report_s": 1.5, "eval/note": "no number"}, step=3)
        made.log_rows("eval/samples", [row(3, "text")], step=3)
        made.alert(title="samples: loop", text="the logger has no place for it", step=3)
    assert backend.logged == [("eval/eval/time/report_s", 1.5, 3)]
    assert logger.get_metric_history("eval", "time/report_s", "eval").tolist() == [1.5]


@pytest.mark.slow
def test_a_wandb_run_that_has_passed_the_step_gets_scalars_and_rows_in_its_open_entry():
    run, other = FakeRun(), LoggerBackend()
    with tracker(wandb_backend(run), other) as (made, _):
        run.log({"train/loss": 2.0}, step=9)
        made.log_rows("eval/samples", [row(5, "text")], step=5)
        made.log({"eval/step": 5, "eval/a": 1.0}, step=5)
        made.alert(title="samples: loop", text="loop in 3 of 4 answers", step=5)
    assert run.alerts == [("samples: loop", "loop in 3 of 4 answers", "WARN")]
    assert [(step, list(values)) for step, values in run.logged[1:]] == [
        (9, ["eval/samples", "eval/samples_state"]),
        (9, ["eval/step", "eval/a"]),
    ]
    assert run.axes == [("eval/step", None), ("eval/*", "eval/step")]
    assert other.logged == [("eval/eval/step", 5.0, 5), ("eval/eval/a", 1.0, 5)]
