"""Levanter's inference engine (marin-levanter) in the place of lockstep's: what `Rollouts` asks of an engine."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig
from levanter.inference.engine import Request as LevanterRequest
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig as LevanterLlama
from levanter.models.llama import LlamaLMHeadModel

from lockstep.engine import Gate
from lockstep.engine.schedule import FindStop
from lockstep.hosts import Ledger
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.models.levanter_reader import AXES
from lockstep.models.weights import STACKED
from lockstep.types import Completion, FinishReason, Request

PARAMETERS, COMPUTE = {"embed": "fsdp"}, {"batch": "fsdp"}
"""Which axis of the mesh splits which axis of Levanter's arrays."""


class LevanterEngine:
    """Samples with Levanter's engine on one host. It is made once, and given the model of each step.

    Its limits are kept: the pages are longer than the prompts, for it gives wrong answers to several generations of a
    prompt that fills a page; and everything fits at once, for it drops what does not.

    Args:
        mesh: The trainer's.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.ledger = mesh, Ledger()
        self._engine: InferenceEngine | None = None
        self._fill = hax.named_jit(_filled, axis_resources=PARAMETERS, out_axis_resources=PARAMETERS)

    def free_bytes(self, model: Any) -> int:
        """Nothing depends on it."""
        jax.block_until_ready(model[1])
        return 0

    def check(self, model: Any, requests: Sequence[Request]) -> None:
        """Refuse what would be wrong without an error."""
        assert max(len(each.prompt_tokens) for each in requests) < _longest(requests)

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int) -> dict[str, str]:
        """It compiles when it runs."""
        return {}

    def stream(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        find_stop: FindStop | None,
        gate: Gate,
    ) -> Iterator[Sequence[Completion]]:
        """All answers at once, as it gives them."""
        assert find_stop is None and all(each.params.ignore_eos for each in requests)
        with gate.launch("levanter"), jax.set_mesh(self._mesh), hax.axis_mapping(COMPUTE):
            theirs = self._as_levanter(*model)
            if self._engine is None:
                self._engine = InferenceEngine.from_model_with_config(
                    theirs, tokenizer=None, config=_options(requests), axis_resources=COMPUTE
                )
            self._engine.model = theirs
            found = self._engine.generate([_request(each) for each in requests])
        pairs = iter(zip(found.tokens, found.logprobs, strict=True))
        for request in requests:
            prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
            answers = []
            for generation in range(request.params.n_generations):
                tokens, logprobs = next(pairs)
                assert len(tokens) == len(logprobs) == new, f"{len(tokens)} of {new} tokens after a prompt of {prompt}"
                answers.append(
                    Completion(
                        prompt_id=request.prompt_id,
                        generation_id=generation,
                        tokens=tuple(tokens),
                        logprobs=tuple(logprobs),
                        finish_reason=FinishReason.LENGTH,
                        sampled_logprobs=tuple(logprobs),
                    )
                )
            yield answers

    def _as_levanter(self, config: LlamaConfig, weights: DecoderWeights) -> LlamaLMHeadModel:
        """Levanter's model with the trainer's weights, its axes in Levanter's order."""
        theirs = LevanterLlama(
            max_seq_len=config.max_seq_len,
            hidden_dim=config.hidden_dim,
            intermediate_dim=config.intermediate_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            layer_norm_epsilon=config.layer_norm_epsilon,
            rope=DefaultRotaryEmbeddingsConfig(theta=config.rope.theta),
            attn_backend=AttentionBackend.VANILLA,
        )
        vocab = hax.Axis("vocab", weights.embed.shape[0])
        with hax.axis_mapping(PARAMETERS):
            return self._fill(vocab, theirs, weights)


def _filled(vocab: hax.Axis, config: LevanterLlama, weights: DecoderWeights) -> LlamaLMHeadModel:
    model = LlamaLMHeadModel.init(vocab, config, key=jax.random.PRNGKey(0))

    def places(model: LlamaLMHeadModel) -> list[hax.NamedArray]:
        layer = model.transformer.layers.stacked
        return [
            model.embeddings.token_embeddings.weight,
            model.transformer.norm.weight,
            model.lm_head.weight,
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            layer.self_attn.q_proj.weight,
            layer.self_attn.k_proj.weight,
            layer.self_attn.v_proj.weight,
            layer.self_attn.o_proj.weight,
            layer.mlp.gate_proj.weight,
            layer.mlp.up_proj.weight,
            layer.mlp.down_proj.weight,
        ]

    ours = [(name, getattr(weights, name)) for name in ("embed", "final_norm", "lm_head")]
    layers = ("attn_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down")
    ours += [(name, getattr(weights.layers, name)) for name in layers]
    filled = []
    for (name, array), place in zip(ours, places(model), strict=True):
        axes = [*(["layer"] if name in STACKED else []), *AXES[name].split()]
        shape = [place.resolve_axis(axis).size for axis in axes]  # axes of heads may be flattened in ours
        filled.append(hax.named(array.reshape(shape), axes).rearrange(place.axes))
    return eqx.tree_at(places, model, filled)


def _longest(requests: Sequence[Request]) -> int:
    return max(len(each.prompt_tokens) + each.params.max_new_tokens for each in requests)


def _options(requests: Sequence[Request]) -> InferenceEngineConfig:
    answers, longest = sum(each.params.n_generations for each in requests), _longest(requests)
    return InferenceEngineConfig(
        max_seq_len=longest,
        page_size=longest,
        max_pages=answers,
        max_seqs=answers,
        max_seqs_in_prefill=answers,
        max_prefill_size=sum(len(each.prompt_tokens) for each in requests),
        max_queued_tokens=max(512, answers),
        max_rounds=max(each.params.max_new_tokens for each in requests),
        compute_dtype=jnp.float32,
    )


def _request(request: Request) -> LevanterRequest:
    params = dataclasses.replace(
        SeqDecodingParams.default(),
        max_num_tokens=jnp.array(len(request.prompt_tokens) + request.params.max_new_tokens, jnp.int32),
        temperature=jnp.array(request.params.temperature, jnp.float32),
        key=jax.random.fold_in(jax.random.PRNGKey(request.params.seed), request.prompt_id),
    )
    return LevanterRequest(
        prompt_tokens=list(request.prompt_tokens),
        request_id=request.prompt_id,
        decode_params=params,
        n_generations=request.params.n_generations,
    )
