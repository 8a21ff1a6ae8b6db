"""The benchmark of GRPO steps: what it compares, refuses and names; its turns, with contestants that do nothing."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import grpo_step
from benchmarks.grpo.load import LOADS, GrpoLoad, reward, save_tokenizer
from benchmarks.grpo.turns import ContestantError, Process
from lockstep.text import Prompt, encode, load_tokenizer
from tests.unit.report.made_up import row

ROOT = Path(__file__).parents[2]
TINY = GrpoLoad(
    hidden=32, mlp=48, layers=2, heads=4, kv_heads=2, vocab=64, prompts=4, group=2, prompt_tokens=8, new_tokens=6
)

SAYS_ITS_NAME = """
import sys
from benchmarks.grpo.turns import Turns
turns = Turns(3)
turns.ready(logprob=-1.0, devices=4)
for step in range(3):
    if step == int(sys.argv[1]):
        sys.exit("out of luck")
    taken = turns.taken()
    with open(sys.argv[2], "a") as file:
        print(sys.argv[3], step, file=file)
    print("noise of a library")
    turns.done(step_s=taken, step=step)
"""


def reports(tokens, *steps):
    """What a contestant says: its model, then steps as (step, rollout, reward) in seconds and points."""
    said = [
        {"step_s": step, "rollout_s": rollout, "reward_s": 0.1, "update_s": 1.0, "tokens": tokens, "reward": points}
        for step, rollout, points in steps
    ]
    return [{"logprob": -1.0, "devices": 4}, *said]


def test_medians_leave_out_the_steps_that_compile_and_ratios_above_one_are_ours_being_faster():
    tokens = TINY.answers * TINY.new_tokens
    heard = {
        "ours": reports(tokens, (50, 40, 0.1), (30, 20, 0.2), (2, 1.0, 0.3), (9, 8.0, 0.4), (3, 1.5, 0.5)),
        "tunix": reports(tokens, (1, 1, 0.1), (1, 1, 0.1), (6, 6.0, 0.1), (7, 6.0, 0.1), (5, 6.0, 0.6)),
    }
    rows = grpo_step.figures(heard, {"levanter": "pip install"}, TINY)
    assert rows["ours"]["step_s"] == 3 and rows["ours"]["rollout_s"] == 1.5
    assert rows["ours"]["rollout_tokens_per_s"] == tokens / 1.5
    assert rows["ours"]["first_steps_s"] == [50, 30] and rows["ours"]["rewards"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert rows["rollout_vs_tunix"] == 4 and rows["step_vs_tunix"] == 2
    assert rows["tunix_rollout_with_ours"] is None and rows["tunix_step_with_ours"] is None
    assert rows["rollout_vs_levanter"] is None and rows["step_vs_levanter"] is None
    assert rows["not_run"] == {"levanter": "pip install"}


def test_a_contestant_that_generates_fewer_tokens_is_refused():
    tokens = TINY.answers * TINY.new_tokens
    heard = {"levanter": reports(tokens - 1, (1, 1, 0), (1, 1, 0), (1, 1, 0))}
    with pytest.raises(ValueError, match=f"levanter generated .*{tokens - 1}.* not {tokens}"):
        grpo_step.figures(heard, {}, TINY)


def updates(rows, loss, *seconds):
    return [{"devices": 4}, *({"update_s": s, "loss": loss, "rows": rows, "tokens": 600} for s in seconds)]


def test_packed_rows_are_compared_with_rows_of_one_answer_that_learn_the_same():
    heard = {"packed": updates(4, -0.25, 9, 9, 1, 2, 3), "padded": updates(8, -0.250001, 9, 9, 7, 6, 5)}
    rows = grpo_step.update_figures(heard)
    assert rows["update_tokens_vs_padded"] == 3 and rows["update_packed"]["tokens_per_s"] == 300
    assert (rows["update_packed"]["rows"], rows["update_padded"]["rows"]) == (4, 8)
    with pytest.raises(ValueError, match="packed rows have the losses"):
        grpo_step.update_figures(heard | {"padded": updates(8, -0.26, 9, 9, 7, 6, 5)})
    assert grpo_step.update_figures({}) == {"update_tokens_vs_padded": None}


def test_the_share_in_which_devices_are_busy_leaves_out_the_steps_that_compile():
    steps = [{"step_s": 4.0, "busy_s": busy} for busy in (0.1, 0.2, 2.0, 4.0, 3.0)]
    assert grpo_step.busy_share(steps) == 0.75 and grpo_step.busy_share([]) is None


@pytest.mark.parametrize("other", [{"logprob": -1.01, "devices": 4}, {"logprob": -1.0, "devices": 1}])
def test_different_models_or_devices_are_refused(other):
    same = {"logprob": -1.0, "devices": 4}
    grpo_step.check_models({"ours": [same], "tunix": [{**same, "logprob": -1.0005}]})
    with pytest.raises(ValueError, match="different models or devices"):
        grpo_step.check_models({"ours": [same], "tunix": [other]})


def test_a_contestant_that_is_not_installed_is_named_with_what_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(grpo_step.importlib.util, "find_spec", lambda name: None)
    commands, missing = grpo_step.contestants(grpo_step.CONTESTANTS)
    assert list(commands) == ["ours"]
    made = grpo_step.MAKE_TUNIX
    assert missing == {"levanter": grpo_step.MAKE_LEVANTER, "tunix": made, "tunix_with_ours": made}
    tokens = TINY.answers * TINY.new_tokens
    grpo_step.show(grpo_step.figures({"ours": reports(tokens, *[(1, 1, 0)] * 3)}, missing, TINY))
    shown = capsys.readouterr().out
    assert grpo_step.MAKE_TUNIX in shown and grpo_step.MAKE_LEVANTER in shown
    monkeypatch.setattr(grpo_step.importlib.util, "find_spec", lambda name: None if name == "levanter" else object())
    commands, missing = grpo_step.contestants(["tunix"])
    assert list(commands) == ["tunix"] and not missing, "what was not asked for is not missing"


def contestant(tmp_path, name, dies_at=-1):
    command = [sys.executable, "-c", SAYS_ITS_NAME, str(dies_at), str(tmp_path / "order"), name]
    return Process(name, command, {"PYTHONPATH": str(ROOT)}, tmp_path / f"{name}.log")


def test_contestants_take_turns(tmp_path):
    with contestant(tmp_path, "a") as a, contestant(tmp_path, "b") as b:
        assert a.ready() == b.ready() == {"logprob": -1.0, "devices": 4}
        found = [(a.step()["step"], b.step()["step"]) for _ in range(3)]
    assert found == [(0, 0), (1, 1), (2, 2)]
    assert (tmp_path / "order").read_text().split() == "a 0 b 0 a 1 b 1 a 2 b 2".split()


def test_a_contestant_that_dies_is_an_error_with_its_last_words(tmp_path):
    with contestant(tmp_path, "a", dies_at=1) as one:
        one.ready(), one.step()
        with pytest.raises(ContestantError, match="a ended with 1 .*\n.*out of luck"):
            one.step()


@pytest.mark.parametrize("load", [TINY, *LOADS.values()])
def test_all_questions_are_equally_long_and_words_survive_the_tokenizer(load, tmp_path):
    save_tokenizer(load, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = load.texts()
    encoded = encode(tokenizer, [Prompt(id=i, text=text) for i, text in enumerate(texts)])
    assert {len(each) for each in encoded} == {load.prompt_tokens} and max(map(max, encoded)) < load.vocab
    assert tokenizer.decode(encoded[0], skip_special_tokens=True) == texts[0]
    assert len(set(texts)) == len(texts)


def test_the_reward_is_a_share_of_words():
    assert reward(row("a4 b5 a8 c6")) == 0.5 and reward(row("")) == 0


@pytest.mark.nightly
def test_levanters_engine_samples_from_the_trainers_own_model(tmp_path):
    """Its log-probabilities of what it drew are those of the trainer's model, after the axes were brought in order."""
    pytest.importorskip("levanter", reason="the extra [levanter] brings its engine")
    from jax.sharding import NamedSharding

    from benchmarks.grpo import ours
    from lockstep.hosts import current
    from lockstep.placement import batch_spec, place
    from lockstep.training import GrpoConfig
    from lockstep.training.loop.logprobs import LogprobProgram
    from lockstep.training.step.programs import Programs

    save_tokenizer(TINY, tmp_path)
    trainer, rollouts = ours.make(TINY, 1, os.fspath(tmp_path), "levanter", current(), ours.LastFigures())
    model = ours.first_model(TINY, trainer.mesh)
    rollouts.batch(0, model)
    columns = rollouts.rollout.columns
    tokens, mask = columns["tokens"], columns["loss_mask"]
    assert mask.sum(1).tolist() == [TINY.new_tokens] * TINY.answers
    assert len({tuple(row) for row in tokens.tolist()}) == TINY.answers, "all answers differ"
    program = LogprobProgram(
        "own",
        lambda model, batch: GrpoConfig().answer_logprobs(model, batch["tokens"]),
        trainer=trainer.config,
        programs=Programs(trainer.hosts, trainer.mesh),
    )
    batch = {"tokens": place(tokens, NamedSharding(trainer.mesh, batch_spec(trainer.mesh)))}
    program.compile(model, batch, microbatches=1)
    found = np.pad(np.asarray(program(model, batch)), ((0, 0), (1, 0)))
    # Its filter leaves out 1e-4 of the probability even where it should leave out nothing.
    np.testing.assert_allclose(columns["rollout_logprobs"][mask], found[mask], atol=5e-4)
    assert np.ptp(found[mask]) > 0.05, "a model whose tokens are all equally probable would show nothing"
