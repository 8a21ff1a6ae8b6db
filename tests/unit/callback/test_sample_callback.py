"""When the callback samples, and that it works in any loop; what it does among hosts is in tests/multiprocess."""

import dataclasses
import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lockstep
from lockstep.callback import InferenceEvalConfig, SampleCallback, sample_callback
from lockstep.callback.evaluation import TasksConfig
from lockstep.health import State
from lockstep.models import UnreadableModelError, register_reader
from lockstep.placement import make_mesh
from lockstep.placement.device import memory as device_memory
from lockstep.report.trackers import JsonlTracker, NoopTracker
from lockstep.training import StepInfo
from tests import tiny
from tests.multiprocess.harness import run_threads
from tests.saved_states import as_saved


@dataclasses.dataclass
class LevanterInfo:
    """Levanter counts steps from 0."""

    step: int
    model: Any = None

    @property
    def next_step(self):
        return self.step + 1


class Counting(SampleCallback):
    """Notes the rounds instead of running them."""

    def __init__(self, **values):
        super().__init__(InferenceEvalConfig(prompts=["one"], **values), tiny.tokenizer())
        self.steps = []

    def _round(self, step, model):
        self.steps.append(step)


def test_a_round_is_due_every_so_many_completed_steps():
    callback = Counting(eval_every=3)
    for step in range(8):
        callback.on_step(LevanterInfo(step))
    assert callback.steps == [3, 6]


def test_a_plain_loop_counts_completed_steps():
    callback = Counting(eval_every=3)
    for step in range(1, 8):
        callback(tiny.Info(step, None))
    assert callback.steps == [3, 6]


@pytest.mark.parametrize(("at_start", "steps"), [(False, [4]), (True, [0, 4])])
def test_before_the_first_step(at_start, steps):
    callback = Counting(eval_every=4, at_start=at_start)
    for step in range(-1, 5):
        callback.on_step(LevanterInfo(step))
    assert callback.steps == steps


def test_levanter_forces_the_last_step_once_more():
    """Every hook is called twice at the end: once because it is its turn, once by force."""
    callback = Counting(eval_every=2)
    for step in range(4):
        callback.on_step(LevanterInfo(step))
    callback.on_step(LevanterInfo(3), force=True)
    assert callback.steps == [2, 4]


@pytest.mark.parametrize(("at_end", "steps"), [(True, [2, 4, 5]), (False, [2, 4])])
def test_forced_at_the_end(at_end, steps):
    callback = Counting(eval_every=2, at_end=at_end)
    for step in range(5):
        callback.on_step(LevanterInfo(step))
    callback(LevanterInfo(4), force=True)
    assert callback.steps == steps


def test_disabled_does_nothing_and_needs_no_prompts():
    callback = SampleCallback(InferenceEvalConfig(enabled=False), tiny.tokenizer())
    callback(tiny.Info(100, object()), force=True)
    callback.check(object())
    assert callback.rounds == 0


def test_hosts_that_disagree_hear_which_keys_differ():
    first, other = (
        sample_callback.config_facts(InferenceEvalConfig(prompts=prompts, max_new_tokens=5))
        for prompts in (["one"], ["two"])
    )
    assert first["inference_eval.max_new_tokens"] == "5" and first["inference_eval.at_start"] == "false"
    assert [key for key in first if first[key] != other[key]] == ["inference_eval.prompts"]
    assert "one" not in first["inference_eval.prompts"] and first.keys() == other.keys()


class Recorder(NoopTracker):
    def __init__(self):
        self.rows, self.scalars = [], []

    def log_rows(self, name, rows, *, step):
        self.rows.append((name, step, list(rows)))

    def log(self, metrics, *, step):
        self.scalars.append((step, dict(metrics)))


@pytest.mark.slow
def test_a_round_reads_the_model_once():
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=tiny.vocab_size())
    reads = []

    class Theirs:
        pass

    @register_reader(Theirs)
    def read(model):
        reads.append(model)
        return tiny.CONFIG, weights

    config = InferenceEvalConfig(prompts=["one"], max_new_tokens=2, eval_every=1, audit=True, on_error="raise")
    callback = SampleCallback(config, tiny.tokenizer())
    callback(tiny.Info(1, Theirs()))
    callback(tiny.Info(2, Theirs()))
    assert callback.rounds == len(reads) == 2


@pytest.mark.slow
def test_the_last_answers_are_drafts_of_the_next(capsys):
    """The same model again: every draft is right, so that the second round takes a part of the steps of the first."""
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=tiny.vocab_size())
    tracker = Recorder()
    config = InferenceEvalConfig(
        prompts=["one", "two", "What is 2 plus 3?"],
        max_new_tokens=24,  # long enough to try drafts of which nothing is known
        temperature=0.7,
        eval_every=1,
        drafts="last_round",
        on_error="raise",
    )
    callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker)
    callback.check((tiny.CONFIG, weights))
    launches = []
    for step in (1, 2):
        before = len(callback.engine.ledger.launches)  # the ledger is the process's: other tests' launches are in it
        callback(tiny.Info(step, (tiny.CONFIG, weights)))
        launches.append(list(callback.engine.ledger.launches[before:]))
    assert callback.flush(30) and callback.report_errors == 0
    assert "verify_8" not in launches[0] and "verify_8" in launches[1]
    assert len(callback.engine.compilations) == len(callback.engine.programs), "the second round compiles nothing"
    first, second = ([row.generated_text for row in rows] for _, _, rows in tracker.rows)
    assert first == second
    before, after = (
        {name.removeprefix("inference_eval/"): value for name, value in each.items()} for _, each in tracker.scalars
    )
    tokens, saved = after["generated_tokens"], after["drafts/steps_saved"]
    assert (
        before["drafts/steps_saved"] == before["drafts/accepted_share"] == 0 and before["drafts/tokens_per_step"] == 1
    )
    assert after["drafts/accepted_share"] == 1
    assert saved > tokens / 2 and after["drafts/tokens_per_step"] == tokens / (tokens - saved)
    assert f"drafts: 100% right, {saved} of {tokens} steps saved" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_says_one_token_for_ever_is_told_by_its_health(tmp_path):
    """Where all weights are zero, all logits are equal: the first token id comes again and again (marin issue 4898)."""
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=tiny.vocab_size())
    weights = jax.tree.map(jnp.zeros_like, weights)
    tracker = Recorder()
    config = InferenceEvalConfig(eval_every=1, prompts=["one", "two"], max_new_tokens=30, on_error="raise")
    callback = lockstep.SampleCallback(config, tiny.tokenizer(), tracker=tracker, output_dir=tmp_path)
    callback(tiny.Info(1, (tiny.CONFIG, weights)))
    assert callback.flush(60) and callback.report_errors == 0
    ((_, _, rows),), ((_, scalars),) = tracker.rows, tracker.scalars
    states = "loop empty cut special_token"  # the token is one for padding, which is no text
    assert [(row.health, row.loop_from) for row in rows] == [(states, 0)] * 2
    shares = {name.rpartition("/")[2]: value for name, value in scalars.items() if "/health/" in name}
    assert shares == {state: float(state in states.split()) for state in State}


def test_a_plain_jax_loop_on_one_device(tmp_path, capsys, caplog, monkeypatch):
    caplog.set_level("INFO", "lockstep")
    held = itertools.count(1000)  # by a device that counts, as a CPU does not
    monkeypatch.setattr(device_memory, "_stats", lambda: [{"bytes_in_use": next(held)}, {"bytes_in_use": 7}, {}])
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    weights = tiny.placed_weights(mesh, vocab=tiny.vocab_size())
    tracker = Recorder()
    config = InferenceEvalConfig(
        eval_every=1,
        prompts=[{"prompt": "one", "answer": "two"}, {"prompt": "two", "answer": "x"}],
        max_new_tokens=5,
        temperature=1.0,
        n_generations=2,
        metrics=["exact_match"],
        on_error="raise",
    )
    callback = lockstep.SampleCallback(config, tiny.tokenizer(), tracker=tracker, output_dir=tmp_path)
    for step in (1, 2):
        callback(tiny.Info(step, (tiny.CONFIG, weights)))
    assert callback.flush(30) and (callback.rounds, callback.report_errors, callback.dropped_reports) == (2, 0, 0)
    # On one device the weights lie right already: no program moves them.
    traces = {name: program.traces for name, program in callback.engine.programs.items()}
    assert traces == {"new_cache": 1, "prefill": 1, "copy_pages": 1, "decode": 1}
    told = [record.message for record in caplog.records if "compiled 4 programs" in record.message]
    assert len(told) == 1 and all(f"  {name} (" in told[0] for name in traces), "told once, and nothing after it"
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_id"], row["generation_id"]) for row in written] == [
        (step, prompt, generation) for step in (1, 2) for prompt in (0, 1) for generation in (0, 1)
    ]
    first, second = written[:4], written[4:]
    # The weights are the same, and draws depend on seed, prompt, generation and position alone.
    assert [row["generated_text"] for row in first] == [row["generated_text"] for row in second]
    assert first[0]["generated_text"] != first[1]["generated_text"]
    assert all(1 <= row["num_tokens"] <= 5 and row["mean_logprob"] < 0 for row in written)
    assert [(name, step, len(rows)) for name, step, rows in tracker.rows] == [
        ("inference_eval/samples", 1, 4),
        ("inference_eval/samples", 2, 4),
    ]
    assert tracker.scalars[0][1]["inference_eval/exact_match"] == 0
    assert tracker.scalars[0][1]["inference_eval/num_completions"] == 4
    moments = ("before", "after")
    memory = [[scalars[f"inference_eval/hbm/{moment}_bytes"] for moment in moments] for _, scalars in tracker.scalars]
    assert memory == [[1000, 1001], [1002, 1003]]
    assert "after 2 steps" in capsys.readouterr().out


def test_a_program_that_changes_its_directory_has_all_samples_in_one_file(tmp_path, monkeypatch):
    """Paths are those of the time when the callback was made."""
    tokenizer, vocab_size = tiny.tokenizer(), tiny.vocab_size()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked.txt").write_text("one\n")
    config = InferenceEvalConfig(eval_every=1, prompts="asked.txt", max_new_tokens=2, on_error="raise")
    tracker = JsonlTracker("run/metrics.jsonl")
    callback = SampleCallback(config, tokenizer, tracker=tracker, output_dir="run")
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=vocab_size)
    for step in (1, 2):
        callback(tiny.Info(step, (tiny.CONFIG, weights)))
        assert callback.flush(30)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("samples", "metrics"):
        rows = [json.loads(line) for line in (tmp_path / "run" / f"{name}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_the_table_can_be_left_out(capsys):
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    tracker = Recorder()
    config = InferenceEvalConfig(eval_every=1, prompts=["one"], max_new_tokens=2, skip_samples_table=True)
    callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker)
    callback(tiny.Info(1, (tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))), force=True)
    assert tracker.rows == [] and len(tracker.scalars) == 1
    assert capsys.readouterr().out == ""


def run_one_round(tmp_path, dtype=None, **values):
    """Rows and scalars of a round on one device."""
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    tracker = Recorder()
    config = InferenceEvalConfig(eval_every=1, prompts=["one"], temperature=1.0, on_error="raise", **values)
    callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker, output_dir=tmp_path, dtype=dtype)
    callback(tiny.Info(1, (tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))), force=True)
    assert callback.report_errors == 0
    (scalars,) = tracker.scalars
    return [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()], scalars[1]


@pytest.mark.slow
def test_the_text_ends_before_a_stop_string(tmp_path):
    free, _ = run_one_round(tmp_path / "free", max_new_tokens=20, n_generations=3)
    # Two characters from the middle of each answer: wherever their tokens begin.
    stops = [row["generated_text"][at : at + 2] for row in free if (at := len(row["generated_text"]) // 2)]
    rows, _ = run_one_round(tmp_path / "stop", max_new_tokens=20, n_generations=3, stop=stops)
    for before, row in zip(free, rows, strict=True):
        text = before["generated_text"]
        assert row["generated_text"] == text[: min(at for stop in stops if (at := text.find(stop)) >= 0)]
        assert row["finish_reason"] == "stop" and row["num_tokens"] <= before["num_tokens"]


@pytest.mark.slow
def test_out_of_time_before_the_first_token(tmp_path, recwarn):
    rows, scalars = run_one_round(tmp_path, max_new_tokens=8, max_seconds=1e-9, n_generations=2, audit=True)
    assert [(row["generated_text"], row["num_tokens"], row["mean_logprob"]) for row in rows] == [("", 0, 0.0)] * 2
    assert {row["finish_reason"] for row in rows} == {"budget"}
    assert scalars["inference_eval/unfinished_completions"] == 2
    assert scalars["inference_eval/logprob_gap"] == 0
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.slow
@pytest.mark.parametrize("audit", [True, False])
def test_the_audit_is_a_metric_that_can_be_switched_on(tmp_path, audit):
    _, scalars = run_one_round(tmp_path, max_new_tokens=6, n_generations=3, audit=audit)
    assert ("inference_eval/logprob_gap" in scalars) == audit
    assert scalars.get("inference_eval/logprob_gap", 0.0) <= 1e-5
    assert "inference_eval/logprob_noise" not in scalars


@pytest.mark.slow
def test_in_bfloat16_the_gap_is_logged_beside_what_rounding_costs(tmp_path):
    _, scalars = run_one_round(tmp_path, dtype="bfloat16", max_new_tokens=6, n_generations=3, audit=True)
    assert 1e-3 < scalars["inference_eval/logprob_noise"] < 0.1
    assert scalars["inference_eval/logprob_gap"] <= 2 * scalars["inference_eval/logprob_noise"]


def test_a_stop_string_that_is_a_special_token_is_refused_at_check():
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    token = tiny.tokenizer().eos_token
    callback = SampleCallback(InferenceEvalConfig(prompts=["one"], stop=[token]), tiny.tokenizer())
    with pytest.raises(lockstep.LockstepError, match="is a special token of the tokenizer .* in stop_token_ids"):
        callback.check((tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size())))


def test_a_model_that_cannot_be_read_is_named_at_check():
    callback = SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer())
    with pytest.raises(lockstep.LockstepError, match=r"dict cannot be read; supported are .*LlamaLMHeadModel"):
        callback.check({"weights": 1})
    assert issubclass(UnreadableModelError, lockstep.LockstepError)


def test_at_the_end_the_others_wait_for_the_last_report_longer_than_for_anything_else():
    def body(hosts):
        config = InferenceEvalConfig(prompts=["one"], timeout_s=0.3, flush_s=60)
        callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
        if hosts.is_leader:
            callback._reporter._queue.put("a slow report", lambda: (time.sleep(1), done.set()))
        callback.finish()
        return done.is_set()

    done = threading.Event()
    assert run_threads(body, 2) == [True, True]


def test_after_a_signal_the_last_report_has_two_seconds(caplog, monkeypatch):
    assert sample_callback.AFTER_SIGNAL_S == 2.0
    monkeypatch.setattr(sample_callback, "AFTER_SIGNAL_S", 0.05)
    release = threading.Event()
    callback = SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer())
    callback._reporter._queue.put("step 3 (1 row)", lambda: release.wait(60))
    callback.after_signal()
    assert "after 0.05 s the report of step 3 (1 row) is not done" in caplog.text
    release.set()
    assert callback.flush()


def test_why_an_alarm_ends_the_run_is_asked_of_the_callback():
    callback = SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer())
    assert callback.stop_reason is None
    callback._reporter._alarms.stop_reason = "loop in 24 of 32 answers"
    assert callback.stop_reason == "loop in 24 of 32 answers"


def test_what_is_not_reported_in_time_names_the_limit_not_what_was_left_of_it(caplog):
    release = threading.Event()
    callback = SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer())
    callback.tasks = SimpleNamespace(wait=lambda timeout_s: time.sleep(timeout_s / 2) or True)
    callback._reporter._queue.put("step 3 (1 row)", lambda: release.wait(60))
    assert not callback.flush(0.1)
    assert "after 0.1 s the report" in caplog.text
    callback.tasks = None
    release.set()
    assert callback.flush()


class Interrupted(Counting):
    """Its round after step 4 ends without samples."""

    def _round(self, step, model):
        self.interrupted = step == 4
        self.rounds += not self.interrupted
        super()._round(step, model)


def test_a_round_that_was_interrupted_is_due_again_after_a_resume():
    callback = Interrupted(eval_every=2)
    for step in range(1, 5):
        callback(tiny.Info(step, None))
    assert callback.interrupted and callback.state()["last_step"] == 2
    resumed = Counting(eval_every=2)
    resumed.load_state(as_saved(callback.state()))
    assert (resumed.rounds, resumed.last_step) == (1, 2)
    resumed(tiny.Info(4, None))
    assert resumed.steps == [4]


def with_tasks(interrupted, **values):
    """A callback whose round of tasks says whether it was interrupted, and the steps of its rounds of tasks."""
    callback, asked = Counting(eval_every=2, **values), []
    if "tasks" not in values:
        callback.config.tasks.names.append("task")
    callback.tasks = SimpleNamespace(
        run=lambda step, model: asked.append(step) or not interrupted, wait=lambda limit_s: True
    )
    return callback, asked


@pytest.mark.parametrize("force", [False, True])
def test_tasks_that_were_interrupted_are_due_again_after_a_resume_and_the_samples_before_them_are_not(force):
    callback, asked = with_tasks(interrupted=True)
    callback.finish = lambda: pytest.fail("the job is asked to end")
    callback.on_step(tiny.Info(2, None), force=force)
    assert callback.interrupted and (callback.steps, asked) == ([2], [2])
    callback.on_step(tiny.Info(3, None))
    assert not callback.interrupted, "it is the round of one step that is left"
    resumed, asked = with_tasks(interrupted=False)
    resumed.load_state(as_saved(callback.state()))
    for step in (2, 2, 3, 4):
        resumed(tiny.Info(step, None))
    assert not resumed.interrupted and (resumed.steps, asked) == ([4], [2, 4])


@pytest.mark.parametrize(
    ("steps", "at_end", "asked_at"), [(6, True, [6]), (8, True, [6, 8]), (9, True, [6, 9]), (8, False, [6])]
)
def test_the_end_of_training_has_its_tasks_whether_or_not_it_has_a_round_of_samples_of_its_own(steps, at_end, asked_at):
    callback, asked = with_tasks(interrupted=False, tasks=TasksConfig(names=["task"], every=6), at_end=at_end)
    for step in range(1, steps + 1):
        callback(tiny.Info(step, None))
    callback(tiny.Info(steps, None), force=True)
    assert asked == asked_at
    resumed, asked = with_tasks(interrupted=False, tasks=callback.config.tasks, at_end=at_end)
    resumed.load_state(as_saved(callback.state()))
    resumed(tiny.Info(steps, None), force=True)
    assert asked == [], "another hook was interrupted in its last call"


def test_tasks_of_the_end_that_were_interrupted_run_once_after_a_resume():
    tasks = TasksConfig(names=["task"], every=6)
    callback, asked = with_tasks(interrupted=True, tasks=tasks)
    callback(tiny.Info(8, None))
    callback(tiny.Info(8, None), force=True)
    assert callback.interrupted and (callback.tasks_left, callback.last_tasks) == (8, None)
    resumed, asked = with_tasks(interrupted=False, tasks=tasks)
    resumed.load_state(as_saved(callback.state()))
    resumed(tiny.Info(8, None))
    resumed(tiny.Info(8, None), force=True)
    assert (resumed.steps, asked) == ([], [8])


def test_a_round_that_was_made_is_not_due_again_after_a_resume():
    callback = Counting(eval_every=2)
    callback(tiny.Info(2, None))
    callback.switched_off = True
    resumed = Counting(eval_every=2)
    resumed.load_state(callback.state())
    resumed(tiny.Info(2, None), force=True)
    assert resumed.steps == []
    resumed(tiny.Info(4, None))
    assert resumed.steps == [4], "a new start tries again"


def test_an_average_of_the_parameters_is_sampled_in_their_place():
    callback = Counting(eval_every=1)
    seen = []
    callback._round = lambda step, model: seen.append(model)
    callback(StepInfo(step=0, model="parameters", loss=1.0, step_duration=0.1))
    callback(StepInfo(step=1, model="parameters", loss=1.0, step_duration=0.1, average="average"))
    callback(tiny.Info(3, "plain"))
    assert seen == ["parameters", "average", "plain"]
