"""The prompts of a round: which they are, and how they travel."""

import dataclasses
import json
import sys

import jax
import pytest

import lockstep
from lockstep.callback import InferenceEvalConfig
from lockstep.callback.round import RoundPrompts, from_bytes, read_round_prompts, to_bytes
from lockstep.errors import ConfigError, HostError
from lockstep.placement import make_mesh
from lockstep.types import Request, SamplingParams
from tests import tiny
from tests.unit.engine.models import request


def test_parameters_travel_whole() -> None:
    sent = [
        request(0, 5, 8, logit_bias=((1, 0.5), (2, -1.0)), allowed_token_ids=(1, 2, 3), top_k=4, stop_token_ids=(3,)),
        request(1, 5, 8, min_tokens=2, ignore_eos=True, top_p=0.3),
    ]
    for questions in (RoundPrompts(requests=sent), RoundPrompts(requests=sent[:1], largest=sent)):
        assert from_bytes(to_bytes(questions)) == questions


def test_requests_survive_the_broadcast():
    config = InferenceEvalConfig(prompts=["one", "What is 2 plus 3?"], temperature=0.5, stop=["x", "yz"], seed=7)
    questions = read_round_prompts(config, tiny.tokenizer())
    assert [prompt.text for prompt in questions.prompts] == config.prompts
    assert from_bytes(to_bytes(questions)) == dataclasses.replace(questions, prompts=[])


def test_a_forged_prompt_has_no_module_imported(tmp_path, monkeypatch):
    """``filters`` may name a module of the user's, which is imported: the host's own configuration says which."""
    params = SamplingParams(max_new_tokens=1, temperature=1.0, filters=("antigravity:geohash=1", "top_n_sigma=2"))
    forged = Request(prompt_id=0, prompt_tokens=(1,), params=params)
    plain = Request(prompt_id=0, prompt_tokens=(1,), params=SamplingParams(max_new_tokens=1))
    for questions in (RoundPrompts(requests=[forged]), RoundPrompts(requests=[plain], largest=[plain, forged])):
        with pytest.raises(HostError, match="the filter 'antigravity:geohash', which the configuration of"):
            from_bytes(to_bytes(questions), ["mine:function=1.5"])
        assert "antigravity" not in sys.modules
        assert from_bytes(to_bytes(questions), ["antigravity:geohash=0.5"]) == questions


def test_prompts_are_dealt_as_from_a_shuffled_pack():
    prompts = [f"{'word ' * number}end" for number in range(11)]
    config = InferenceEvalConfig(prompts=prompts, prompts_per_round=3, eval_every=10, seed=5, at_start=True)
    # After the last step there is a round of its own, whose step is no multiple of eval_every.
    steps = [0, 10, 20, 30, 40, 45]
    rounds = [read_round_prompts(config, tiny.tokenizer(), step) for step in steps]
    ids = [[prompt.id for prompt in each.prompts] for each in rounds]
    assert [len(set(each)) for each in ids] == [3] * 6 and all(each == sorted(each) for each in ids)
    assert len({*ids[0], *ids[1], *ids[2]}) == len({*ids[3], *ids[4], *ids[5]}) == 9, "none twice in a deal"
    assert ids[3:] != ids[:3], "shuffled anew"
    for each in rounds:
        assert [request.prompt_id for request in each.requests] == [prompt.id for prompt in each.prompts]
        assert [prompt.text for prompt in each.prompts] == [prompts[number] for number in (p.id for p in each.prompts)]
        assert [request.prompt_id for request in each.compile_requests] == [10, 9, 8]
    assert ids == [[p.id for p in read_round_prompts(config, tiny.tokenizer(), step).prompts] for step in steps]
    later = dataclasses.replace(config, at_start=False)
    assert ids[:-1] == [[p.id for p in read_round_prompts(later, tiny.tokenizer(), step).prompts] for step in steps[1:]]
    other = dataclasses.replace(config, seed=6)
    assert ids != [[p.id for p in read_round_prompts(other, tiny.tokenizer(), step).prompts] for step in steps]


def test_a_file_with_no_more_prompts_than_a_round_has_is_refused(tmp_path):
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    config = InferenceEvalConfig(prompts=str(tmp_path / "two.txt"), prompts_per_round=2)
    with pytest.raises(ConfigError, match="prompts_per_round is 2 and there are 2 prompts.*at most 1, or use null"):
        read_round_prompts(config, tiny.tokenizer())


SOFT = "<image_soft_token>"


def callback_and_model(tmp_path, **values):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [SOFT], "eos_token": "<beyond>"})
    rows = len(tokenizer) - 2
    config = lockstep.InferenceEvalConfig(eval_every=1, max_new_tokens=2, on_error="raise", **values)
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=rows)
    return lockstep.SampleCallback(config, tokenizer, output_dir=tmp_path), (tiny.CONFIG, weights)


def test_rounds_go_on_without_them_and_without_the_end_that_is_one(tmp_path, caplog):
    callback, model = callback_and_model(tmp_path, prompts=["What is 12 plus 7?"])
    callback.check(model)
    callback(tiny.Info(1, model))
    callback.finish()
    (row,) = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert row["num_tokens"] == 2
    (warning,) = (text for text in caplog.messages if "beyond" in text)
    assert warning.startswith("2 added tokens") and "'<beyond>' ends an answer as the tokenizer says" in warning


WRONG = {
    "a token": (f"What is {SOFT}?", rf"prompt 1 \(PATH:3\) has the token '{SOFT}' \(id \d+\)"),
    "its length": (
        "12 " * 63,
        r"prompt 1 \(PATH:3\) has \d+ tokens .* but the model allows 64\. Shorten the prompt to 62",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_prompt_that_the_model_cannot_take_is_named_with_its_line(name, tmp_path):
    prompt, text = WRONG[name]
    path = tmp_path / "asked.txt"
    path.write_text(f"one\n\n{prompt}\n")
    callback, model = callback_and_model(tmp_path, prompts=str(path))
    text = text.replace("PATH", str(path))
    with pytest.raises(lockstep.LockstepError, match=text):
        callback.check(model)
    with pytest.raises(lockstep.LockstepError, match=text):  # also of a loop that does not check first
        callback(tiny.Info(1, model))
