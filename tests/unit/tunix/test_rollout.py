"""Our rollout against Tunix's own: the same prompts, tokens and log-probabilities; on the actor's mesh and another."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import qwix
import tokenizers
from flax import nnx
from tokenizers import decoders, normalizers
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.text import load_tokenizer
from lockstep.tunix import Rollout
from lockstep.tunix.rollout import compute_dtype
from tests import made_tokenizers, tiny
from tests import tunix_models as models

PROMPTS = ["What is 12 plus 7?", "What is 12 plus 7?", "one", "What is 40 in words?"]
CONFIG = RolloutConfig(max_tokens_to_generate=10, max_prompt_length=16, kv_cache_size=64, return_logprobs=True)


def model_on(mesh, name="qwen3", seed=0):
    return models.randomise(models.MODELS[name](tiny.vocab_size()), mesh, seed=seed)


def rollout(model, mesh, config=CONFIG, **options):
    adapter = TokenizerAdapter(tiny.tokenizer())
    return Rollout(rollout_actor=model, tokenizer=adapter, mesh=mesh, rollout_config=config, **options)


def vanilla(model):
    sizes = CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8)
    return VanillaRollout(model, TokenizerAdapter(tiny.tokenizer()), sizes)


def own_logprobs(model, output, temperature):
    """Tunix's log-probabilities of the tokens of an output.

    Its forward hides each padding token, also one that was sampled; so what fills rows here is an id that is none.
    """
    graph, state = nnx.split(model)
    padding, prompts = tiny.vocab_size(), np.array(output.left_padded_prompt_tokens)
    prompts[prompts == tiny.tokenizer().pad_token_id] = padding
    tokens = np.full((len(output.tokens), 10), padding, np.int32)
    for row, each in zip(tokens, output.tokens, strict=True):
        row[: len(each)] = each
    found = common.compute_per_token_logps(
        graph,
        state,
        prompt_tokens=prompts,
        completion_tokens=tokens,
        pad_id=padding,
        eos_id=tiny.tokenizer().eos_token_id,
        temperature=temperature,
    )
    return [row[: len(each)] for row, each in zip(np.asarray(found), output.tokens, strict=True)]


def close(one, other):
    assert [len(each) for each in one] == [len(each) for each in other]
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_greedy_answers_are_those_of_tunix_own_rollout():
    mesh = models.mesh(2, 2)
    model = model_on(mesh)
    greedy = dataclasses.replace(CONFIG, top_p=None)
    with mesh:
        ours, theirs = rollout(model, mesh).generate(PROMPTS, greedy), vanilla(model).generate(PROMPTS, greedy)
    assert [each.tolist() for each in ours.tokens] == [each.tolist() for each in theirs.tokens]
    assert ours.text == theirs.text and ours.logits == theirs.logits
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    assert close(ours.logprobs, theirs.logprobs) < 1e-5
    with mesh:
        prompts, tokens = ours.left_padded_prompt_tokens, np.asarray([each[:3] for each in ours.tokens])
        one, other = (made.get_per_token_logps(prompts, tokens) for made in (rollout(model, mesh), vanilla(model)))
    np.testing.assert_array_equal(one, other)


SAMPLING = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "filters at 1": {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
    "filters at 0.7": {"temperature": 0.7, "top_k": 20},
}


@pytest.mark.slow
def test_logprobs_are_those_of_tunix_own_forward_at_the_temperature_without_filters():
    mesh = models.mesh(2, 2)
    model = model_on(mesh)
    made = rollout(model, mesh)
    for name, values in SAMPLING.items():
        config = dataclasses.replace(CONFIG, **values)
        with mesh:
            output = made.generate(PROMPTS, config)
            assert close(output.logprobs, own_logprobs(model, output, config.temperature)) < 1e-5, name


@pytest.mark.slow
def test_every_call_has_other_draws_and_a_seed_repeats_them_all():
    mesh = models.mesh(2, 2)
    model = model_on(mesh)

    def calls(seed):
        made = rollout(model, mesh)
        config = dataclasses.replace(CONFIG, seed=seed, return_logprobs=False)
        outputs = [made.generate(PROMPTS, config) for _ in range(2)]
        assert outputs[0].logprobs is None
        return [[each.tolist() for each in output.tokens] for output in outputs], made.engine.compilations

    (first, second), compilations = calls(jax.random.PRNGKey(3))
    assert first != second and first[0] != first[1], "equal prompts have draws of their own"
    assert calls(jax.random.PRNGKey(3))[0] == [first, second] != calls(None)[0]
    assert len({each.name for each in compilations}) == len(compilations), "nothing is compiled twice"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_on_a_mesh_of_its_own_it_follows_the_updates_of_the_actor(lora):
    devices = jax.devices()
    actors, rollouts = (models.mesh_of(devices[:2], 2, 1), models.mesh_of(devices[2:4], 1, 2))
    actor = model_on(actors)
    kind = nnx.LoRAParam if lora else nnx.Param
    if lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|down_proj)", rank=4, alpha=8.0)
        with actors:
            actor = qwix.apply_lora_to_model(actor, provider, rngs=nnx.Rngs(1), **actor.get_model_input())
    greedy = dataclasses.replace(CONFIG, top_p=None)
    made = rollout(actor, rollouts)
    assert made.model() is not actor and rollout(actor, actors).model() is actor

    def answers():
        with rollouts:
            output = made.generate(PROMPTS, greedy)
        assert close(output.logprobs, own_logprobs(actor, output, 1.0)) < 1e-5
        return [each.tolist() for each in output.tokens]

    before = answers()
    state = nnx.state(actor, kind)
    rng = np.random.default_rng(1)
    changed = jax.tree.map(
        lambda leaf: jax.device_put(
            np.asarray(leaf) + 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding
        ),
        state,
    )
    nnx.update(actor, changed)
    made.update_params(nnx.state(actor, (kind,)), (kind,))
    assert answers() != before


def test_what_has_no_effect_is_refused():
    mesh = models.mesh(1, 1)
    model = models.MODELS["qwen3"](tiny.vocab_size())
    with pytest.raises(ConfigError, match=r"engine\.weight_dtype is int8: .* Set weight_dtype to auto"):
        rollout(model, mesh, engine=EngineConfig(weight_dtype="int8"))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; lockstep.tunix.Rollout chooses its layout"):
        rollout(model, mesh, dataclasses.replace(CONFIG, tensor_parallel_size=2))


def test_the_compute_dtype_is_the_configuration_s():
    assert compute_dtype(models.MODELS["qwen3"]()) == "float32"
    assert compute_dtype(models.MODELS["llama3"]()) is None


def test_a_job_that_is_asked_to_end_learns_from_no_answers(monkeypatch):
    mesh = models.mesh(1, 1)
    ended = SimpleNamespace(ended=True, completions=[])
    monkeypatch.setattr("lockstep.tunix.rollout.Session.generate", lambda *_, **__: ended)
    with pytest.raises(LockstepError, match="the job is asked to end"):
        rollout(model_on(mesh), mesh).generate(PROMPTS, CONFIG)


def word_tokenizer(place):
    """As Llama 2's with ``add_eos_token``: each word has its space, which decoding leaves out of the first; an end
    behind every text.
    """
    vocab = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", *(f"▁w{n}" for n in range(61))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ends = [("<s>", 1), ("</s>", 2)]
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, ends)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return load_tokenizer(made_tokenizers.write(place, made, settings))


@pytest.mark.slow
def test_answers_keep_their_first_space_and_prompts_have_no_end(tmp_path):
    tokenizer, mesh = word_tokenizer(tmp_path / "made"), models.mesh(1, 1)
    assert tokenizer.encode("w1 w2") == [1, 4, 5, 2]
    model = models.randomise(models.MODELS["qwen3"](64), mesh, seed=0)
    config = dataclasses.replace(CONFIG, top_p=None, return_logprobs=False, eos_tokens=[2])
    made = Rollout(rollout_actor=model, tokenizer=tokenizer, mesh=mesh, rollout_config=config)
    with mesh:
        output = made.generate(["w1 w2", "w7"], config)
    pad = tokenizer.pad_token_id
    prompts = [[token for token in row if token != pad] for row in output.left_padded_prompt_tokens.tolist()]
    assert prompts == [[1, 4, 5], [1, 10]]
    for text, tokens in zip(output.text, output.tokens, strict=True):
        assert len(tokens) and min(tokens) > 2
        assert text == "".join(f" w{token - 3}" for token in tokens)
