"""A model and data so small that a test trains and samples in seconds; the same numbers on every mesh."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import haliax as hax
import jax
import numpy as np

from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import DecoderWeights, LayerWeights, LlamaConfig, LlamaLMHeadModel, as_trainable, padded_vocab_size
from lockstep.placement import make_mesh, place
from lockstep.text import load_tokenizer
from lockstep.training import (
    CheckpointerConfig,
    OptimizerConfig,
    TokenizedRows,
    Trainer,
    TrainerConfig,
    lm_loss,
    model_spec,
    save_tokenizer,
)
from lockstep.training.checkpoints.checkpointer import Checkpointer
from lockstep.training.step.train_state import TrainState
from lockstep.types import Request, SamplingParams

TOKENIZER = "data/demo/tokenizer"
CONFIG = LlamaConfig(
    max_seq_len=64,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
    initializer_range=0.2,
)


def tokenizer() -> Any:
    """The demo's tokenizer; tests run in the repository root."""
    return load_tokenizer(TOKENIZER)


def vocab_size() -> int:
    """Its number of ids, rounded up so that two devices can split it."""
    return -(-(max(tokenizer().get_vocab().values()) + 1) // 4) * 4


def rows(count: int = 64, length: int = 24) -> TokenizedRows:
    """Random training rows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size(), (count, length)).astype(np.int32)
    return TokenizedRows(columns={"tokens": tokens, "loss_mask": np.ones_like(tokens, bool)}, seed=0)


def make_trainer(mesh_shape: str, steps: int, hosts: Any = None, tracker: Any = None, **values: Any) -> Trainer:
    """A trainer whose steps change the weights visibly."""
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, mesh_shape=mesh_shape, **values)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    schedule = optimizer.schedule(steps)
    return Trainer(config, optimizer.build(steps), lm_loss, hosts, tracker=tracker, schedule=schedule)


def init(key: jax.Array, config: LlamaConfig = CONFIG) -> LlamaLMHeadModel:
    """A model as a run begins with."""
    return LlamaLMHeadModel.init(hax.Axis("vocab", vocab_size()), config, key=key)


def init_model(trainer: Trainer, vocab: int | None = None, config: LlamaConfig = CONFIG) -> LlamaLMHeadModel:
    """A model with random weights on the trainer's mesh; nothing is compiled, which takes seconds for random draws."""
    return as_trainable(config, placed_weights(trainer.mesh, vocab=vocab or vocab_size()))


def numpy_weights(config: LlamaConfig = CONFIG, vocab: int = 64, seed: int = 0) -> DecoderWeights:
    """Random decoder weights as NumPy arrays: the same on every process, whatever its devices."""
    rng = np.random.default_rng(seed)
    layers, embed, mlp, head = config.num_layers, config.hidden_dim, config.intermediate_dim, config.head_size
    kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * config.initializer_range).astype(np.float32)

    return DecoderWeights(
        embed=normal(vocab, embed),
        layers=LayerWeights(
            attn_norm=1 + normal(layers, embed),
            q=normal(layers, embed, kv, group, head),
            k=normal(layers, embed, kv, head),
            v=normal(layers, embed, kv, head),
            o=normal(layers, kv, group, head, embed),
            mlp_norm=1 + normal(layers, embed),
            gate=normal(layers, embed, mlp),
            up=normal(layers, embed, mlp),
            down=normal(layers, mlp, embed),
        ),
        final_norm=1 + normal(embed),
        lm_head=normal(embed, vocab),
    )


def placed_weights(mesh: jax.sharding.Mesh, **options: Any) -> DecoderWeights:
    """`numpy_weights` sharded as the trainer shards parameters: embed over fsdp, heads, mlp and vocabulary over tp."""
    axes = {
        "embed": ("tp", "fsdp"),
        "lm_head": ("fsdp", "tp"),
        "final_norm": ("fsdp",),
        "attn_norm": (None, "fsdp"),
        "mlp_norm": (None, "fsdp"),
        "q": (None, "fsdp", "tp"),
        "k": (None, "fsdp", "tp"),
        "v": (None, "fsdp", "tp"),
        "o": (None, "tp", None, None, "fsdp"),
        "gate": (None, "fsdp", "tp"),
        "up": (None, "fsdp", "tp"),
        "down": (None, "tp", "fsdp"),
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(
            leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes[path[-1].name]))
        ),
        numpy_weights(**options),
    )


def requests(temperature: float = 0.0, n_generations: int = 1, lengths: tuple[int, ...] = (1, 5, 17, 33, 40, 16)):
    """Prompts of mixed lengths with 12 new tokens each; token 5 ends an answer."""
    rng = np.random.default_rng(1)
    params = SamplingParams(
        max_new_tokens=12, temperature=temperature, seed=3, n_generations=n_generations, stop_token_ids=(5,)
    )
    return [
        Request(prompt_id=i, prompt_tokens=tuple(rng.integers(0, 64, n).tolist()), params=params)
        for i, n in enumerate(lengths)
    ]


@dataclasses.dataclass
class Info:
    """What a loop of one's own passes to the callback."""

    step: int
    model: Any


def save_checkpoint(
    path: str,
    step: int = 4,
    mesh_shape: str = "auto",
    hosts: Any = None,
    seed: int = 0,
    adapters: Any = None,
    opt_state: Callable[[Any], Any] = lambda trained: (),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A training checkpoint with random weights and the demo's tokenizer beside it; the model, or adapters, in it."""
    mesh = make_mesh(mesh_shape)
    rows = padded_vocab_size(vocab_size(), 1)
    if adapters is None:
        model = as_trainable(CONFIG, placed_weights(mesh, vocab=rows, seed=seed))
    else:
        random = np.random.default_rng(seed)
        model = jax.tree.map(
            lambda leaf: place(
                random.normal(size=leaf.shape).astype(adapters.lora.base_dtype), jax.NamedSharding(mesh, jax.P())
            ),
            adapters.lora.shapes(CONFIG),
        )
    checkpointer = Checkpointer(
        CheckpointerConfig(),
        path,
        Hosts(MemoryClient.hub(1)[0]) if hosts is None else hosts,
        facts=facts,
        run_config={"tokenizer": TOKENIZER},
        reported=lambda: None,
        model=model_spec(CONFIG, vocab_size(), adapters),
    )
    state = TrainState(
        step=place(np.int32(step), jax.NamedSharding(mesh, jax.P())), model=model, opt_state=opt_state(model)
    )
    checkpointer.save(state, step=step, loss=1.0, hooks={}, hooks_called=True)
    checkpointer.wait()
    assert checkpointer.errors == 0
    if hosts is None or hosts.is_leader:
        save_tokenizer(path, tokenizer())
    return model
