"""The configuration of train-grpo, and input that cannot work."""

import json
import re
import runpy
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from lockstep.errors import ConfigError
from lockstep.launch.machines import Ssh
from lockstep.launch.options import parse_options
from lockstep.launch.sync import make_archive
from lockstep.main.arguments import parse_arguments
from lockstep.text import encode, read_prompts
from lockstep.training import TrainGrpoConfig
from lockstep.training.rl import load_questions
from lockstep.training.run import grpo as module
from tests import tiny
from tests.unit.training.rl import test_tools

ROOT = Path(__file__).parents[4]
SHIPPED = sorted(path.name for path in (ROOT / "config").glob("grpo_*.yaml"))


def read(*arguments, name="grpo_gsm8k_qwen25_3b_v6e_8.yaml"):
    return parse_arguments(TrainGrpoConfig, ["--config_path", str(ROOT / "config" / name), *arguments])


def test_a_batch_is_made_of_whole_groups():
    with pytest.raises(ConfigError, match=r"train_batch_size is 20 answers .* Use a multiple of 8, e\.g\. 16\."):
        read("--trainer.train_batch_size", "20", "--rollout.n_generations", "8")


def test_one_answer_is_no_group():
    with pytest.raises(ConfigError, match=r"rollout\.n_generations is 1; it must be at least 2"):
        read("--rollout.n_generations", "1")


def test_a_row_has_room_for_prompt_and_answer():
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is 64 and data\.max_seq_len is 64; .* less than"):
        read("--rollout.max_new_tokens", "64", "--data.max_seq_len", "64")


def test_an_environment_is_given_by_its_class(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "agent_demo"))
    given = {"type": "calculator:Calculator", "max_turns": 3, "timeout_s": 2.5}
    environment = read("--environment", json.dumps(given)).environment
    assert (type(environment).__name__, environment.max_turns, environment.timeout_s) == ("Calculator", 3, 2.5)
    assert read().environment is None and read("--environment.type", "retry").environment.discount == 0.5
    with pytest.raises(ConfigError, match="environment.max_turns is 0; it must be at least 1"):
        read("--environment", json.dumps({**given, "max_turns": 0}))
    with pytest.raises(ConfigError, match="rollout.drafts is auto and an environment is given"):
        read("--environment", json.dumps(given), "--rollout.drafts", "auto")
    sys.modules.pop("calculator")


def test_the_chat_template_of_a_run_describes_the_tools_of_its_environment(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = test_tools.HERMES
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 2?", "answer": "#### 3"}\n')
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--initialize_from_hf", "null", "--model.type", "llama"]
    words += ["--data.train_urls", json.dumps([str(tmp_path / "questions.jsonl")]), "--data.max_seq_len", "4096"]
    tools = ["--environment.type", f"{test_tools.__name__}:Sums"]
    config = read(*words, *tools)
    tokenizer = config.read_tokenizer()
    questions = config.load(tokenizer, 4096, 0)
    described = test_tools.described([dict(message) for message in questions.prompts[0].messages])
    assert questions.tokens[0] == tuple(tokenizer.encode(described, add_special_tokens=False))
    assert len(questions.tokens[0]) > len(read(*words).load(read(*words).read_tokenizer(), 4096, 0).tokens[0]) + 50
    with pytest.raises(
        ConfigError, match=r"the environment has tools, .* data.format text makes texts, such as '1 \+ 2"
    ):
        read(*words, *tools, "--data.format", "text").load(tokenizer, 4096, 0)


@pytest.mark.parametrize(("coefficient", "reference"), [("0", False), ("0.04", True)])
def test_a_reference_is_needed_where_the_loss_compares_with_one(coefficient, reference):
    config = read("--kl_coefficient", coefficient)
    assert config.has_reference == reference and config.loss_fn.kl_coefficient == float(coefficient)
    assert ("reference_logprobs" in config.columns(1024)) == reference


@pytest.mark.parametrize(("coefficient", "reference"), [("0.0", None), ("0.1", "the model before training")])
def test_the_reference_is_read_where_the_loss_compares_with_one(coefficient, reference, monkeypatch):
    given, hooks = {}, []

    class Recorder:
        def __init__(self, *_, **options):
            given.update(options)

        def check(self, model):
            assert model == "the model"

    monkeypatch.setattr(module, "Rollouts", Recorder)
    monkeypatch.setattr(module, "read_decoder", lambda model: (model, None))
    trainer = SimpleNamespace(mesh=None, hosts=None, tracker=None, add_hook=hooks.append)
    setup = SimpleNamespace(
        trainer=trainer, tokenizer=tiny.tokenizer(), data=None, run_dir=None,
        model="the model", reference=lambda renewal: "the model before training",
    )  # fmt: skip
    assert [read("--kl_coefficient", coefficient).make_batches(setup)] == hooks
    assert given["frozen"].reference == reference and given["model"] == "the model"


JUDGES = '[{{"type": "model", "model": "{0}"}}, {{"type": "model", "model": "{0}", "name": "judge"}}]'


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--initialize_from_hf", "{}", "--kl_coefficient", "0.1"], ["reference model"]),
        (["--teacher", "{}", "--teacher_coefficient", "1"], ["teacher"]),
        (["--rewards", JUDGES], ["reward model model", "reward model judge"]),
    ],
)
def test_a_run_that_goes_on_has_the_same_frozen_models(words, names, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read("--initialize_from_hf", str(tmp_path)).facts() == {}, "there is none"
    facts = []
    for weight in (1.0, 2.0):
        save_file({"weight": np.full(3, weight, np.float32)}, tmp_path / "model.safetensors")
        facts.append(read(*(word.format(tmp_path) for word in words)).facts())
    assert facts[0].keys() == facts[1].keys() == {*names} and not facts[0].items() & facts[1].items()


def test_the_loss_has_all_of_its_settings():
    config = read("--loss", "gspo", "--clip_epsilon_high", "4e-4", "--use_rollout_logprobs", "false")
    assert (config.loss_fn.loss, config.loss_fn.clip_epsilon_high) == ("gspo", 4e-4)
    assert "old_logprobs" not in config.columns(1024)
    config = read("--num_iterations", "2", "--use_rollout_logprobs", "false")
    assert "old_logprobs" in config.columns(1024) and config.updates == 2


def test_a_policy_has_no_token_beyond_the_tokenizer():
    tokenizer = tiny.tokenizer()
    assert read().make_objective(tokenizer).vocab_size == max(tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0, 2.0])
def test_the_gradient_is_that_of_the_mean_reward_of_what_is_sampled(temperature):
    """Over all answers of two tokens, each as often as it is drawn; the reward depends on the first token alone."""
    config = read("--rollout.temperature", str(temperature), "--use_rollout_logprobs", "false")
    draw = np.random.default_rng(0)
    logits = jnp.asarray(draw.standard_normal((4, 3)), jnp.float32)  # of the token after 0, 1, 2 and the prompt, 3
    answers = np.array([(first, second) for first in range(3) for second in range(3)])
    rewards = np.array([1.0, -0.5, 0.3], np.float32)

    def drawn(logits):
        logprobs = jax.nn.log_softmax(logits / temperature)
        return jnp.exp(logprobs[3, answers[:, 0]] + logprobs[answers[:, 0], answers[:, 1]])

    def loss(logits, shares):
        batch = {
            "tokens": jnp.asarray(np.pad(answers, ((0, 0), (1, 0)), constant_values=3)),
            "loss_mask": jnp.asarray([[False, True, True]] * len(answers)),
            "advantage": shares * rewards[answers[:, 0]],
            "rollout_logprobs": jnp.zeros((len(answers), 3)),
        }
        return config.loss_fn(lambda ids: hax.named(logits[ids.array], ("batch", "position", "vocab")), batch).total

    shares = drawn(logits)
    expected = jax.grad(lambda logits: -jnp.sum(drawn(logits) * rewards[answers[:, 0]]) / 2)(logits)
    found = jax.grad(loss)(logits, shares)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found[:3], 0, atol=1e-6, err_msg="the second token has no part in the reward")


def test_answers_are_sampled_as_the_rollout_says():
    config = read("--rollout.max_new_tokens", "17")
    assert config.rollouts is config.rollout and config.rollouts.max_new_tokens == 17


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_configurations_fit_their_rows(name):
    config = read(name=name)
    assert config.columns(32768)["tokens"].shape == (config.data.max_seq_len,)
    assert config.data.max_seq_len > config.rollout.max_new_tokens
    assert config.inference_eval.max_new_tokens == config.rollout.max_new_tokens, "held-out answers would be cut"


def not_a_number(row, prompt):
    return "good"


def test_what_is_loaded_before_any_device_work(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "What is 1 plus 1?", "answer": "#### 2"}) + "\n")
    arguments = ["--data.train_urls", json.dumps([str(path)]), "--data.format", "text", "--rollout.max_new_tokens", "8"]
    arguments += ["--data.instruction", ""]

    def load(*more, tokenizer=None):
        return read(*arguments, *more).load(tokenizer or tiny.tokenizer(), 64, 0)

    assert len(load("--data.max_seq_len", "32")) == 1
    place = r"q\.jsonl:1: the prompt has \d+ tokens .* but "
    with pytest.raises(ConfigError, match=place + r"data\.max_seq_len is 12\. Raise it to at least \d+, lower .* to"):
        load("--data.max_seq_len", "12")
    unset = ["--data.max_seq_len", "null"]
    with pytest.raises(ConfigError, match=place + r"the model allows 9\. Shorten the prompt, or set data\.truncate"):
        read(*arguments, *unset).load(tiny.tokenizer(), 9, 0)
    with pytest.raises(ConfigError, match=r"q\.jsonl:1 has the token '.*' \(id \d+\), and the model's embedding has"):
        read(*arguments, *unset).load(tiny.tokenizer(), 64, 0, vocab_size=8)
    bad = json.dumps([{"type": "function", "function": f"{__name__}:not_a_number"}])
    with pytest.raises(ConfigError, match="rewards: not_a_number was tried .* returned 'good', which is not a number"):
        load("--data.max_seq_len", "32", "--rewards", bad)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"q\.jsonl:1: .* has no chat template"):
        load("--data.max_seq_len", "32", "--data.format", "chat", tokenizer=tokenizer)


def test_data_and_a_reward_of_ones_own_work_where_only_what_was_synced_is(tmp_path, monkeypatch):
    """As docs/grpo.md says it: the reward of that page, in a file beside the configuration, on a machine of a pod."""
    mine, pod, tokenizer = tmp_path / "mine", tmp_path / "pod", tiny.tokenizer()
    (mine / "runs").mkdir(parents=True)
    pod.mkdir()
    page = (ROOT / "docs" / "grpo.md").read_text()
    (reward,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def judge" in each]
    (mine / "runs" / "walk_rewards.py").write_text(reward)
    record = {"ask": "What is 1 plus 1?", "gold": "It is two.", "must_say": ["two"]}
    (mine / "runs" / "questions.jsonl").write_text(json.dumps(record) + "\n")
    given = yaml.safe_load((ROOT / "config" / "grpo_demo.yaml").read_text())
    given["rewards"] = [{"type": "function", "function": "walk_rewards:judge"}]
    urls = {"train_urls": ["runs/questions.jsonl"], "question_field": "ask", "answer_field": "gold"}
    given["data"] |= urls | {"max_seq_len": 64}
    (mine / "runs" / "my.yaml").write_text(yaml.safe_dump(given))
    command = ["lockstep", "train-grpo", "--config_path", "runs/my.yaml"]
    monkeypatch.chdir(mine)
    words = ["--backend", "ssh", "--hosts", "a", "--sync", "runs/my.yaml", "--sync", "runs/questions.jsonl"]
    synced = parse_options([*words, "--", *command], {"ssh": Ssh}).sync
    with tarfile.open(make_archive(synced, None, tmp_path / "x.tar.gz").path) as archive:
        archive.extractall(pod, filter="data")
    assert sorted(path.name for path in (pod / "runs").iterdir()) == ["my.yaml", "questions.jsonl", "walk_rewards.py"]
    monkeypatch.chdir(pod)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = parse_arguments(TrainGrpoConfig, command[2:])
    (prompt,) = config.load(tokenizer, 64, 0).prompts
    assert (prompt.answer, prompt.fields) == ("It is two.", {"must_say": ["two"]})
    assert Path(sys.modules.pop("walk_rewards").__file__).parent == pod / "runs"


def test_every_reference_answer_is_read_before_training(tmp_path):
    path = tmp_path / "q.jsonl"
    answers = ["#### 2", "two\n#### Final Answer\n2", "#### two", "3"]
    path.write_text("".join(json.dumps({"question": "What?", "answer": each}) + "\n" for each in answers))
    arguments = ["--data.train_urls", json.dumps([str(path)]), "--data.format", "text", "--data.max_seq_len", "32"]
    arguments += ["--data.instruction", "", "--rollout.max_new_tokens", "8"]

    def load(*more):
        return read(*arguments, *more).load(tiny.tokenizer(), 64, 0)

    with pytest.raises(ConfigError, match=r"q\.jsonl:3 has the answer '#### two', which has no number .* gsm8k"):
        load()
    assert [each.answer for each in load("--data.on_bad_row", "skip").prompts] == [*answers[:2], "3"]
    assert len(load("--rewards", json.dumps([{"type": "exact_match"}]))) == 4


SOLUTIONS = [
    ("A farm has 3 pens with 1,250 hens each. How many hens?", "3*1,250 = <<3*1250=3750>>3,750 hens.\n#### 3,750"),
    ("A coat costs $80 and is sold at 15% off. What is saved?", "80*0.15 = $<<80*0.15=12>>12\n#### 12"),
]
"""In the format of GSM8K."""


@pytest.mark.parametrize("name", SHIPPED)
def test_held_out_questions_are_asked_as_those_of_training(name, tmp_path, monkeypatch, capsys):
    asked, output = tmp_path / "test.jsonl", tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in SOLUTIONS))
    config = ROOT / "config" / name
    monkeypatch.setattr(sys, "argv", ["make", "--config_path", str(config), str(asked), str(output)])
    runpy.run_path(str(ROOT / "scripts" / "make_grpo_prompts.py"), run_name="__main__")
    assert "2 prompts" in capsys.readouterr().out

    prompts = read_prompts(str(output))
    trained = read("--data.train_urls", json.dumps([str(asked)]), name=name)
    questions = load_questions(trained.data, tiny.tokenizer(), row_length=1024, max_new_tokens=8, seed=0)
    assert tuple(encode(tiny.tokenizer(), prompts)) == tuple(questions.tokens)
    assert [prompt.answer for prompt in prompts] == [answer for _, answer in SOLUTIONS]
