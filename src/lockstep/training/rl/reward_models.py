"""Reward models: sequence classifiers on the training mesh, whose scores of answers every host launches together."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from lockstep.config_fields import FilePath
from lockstep.errors import ConfigError, PromptError, check_at_least
from lockstep.hosts import Hosts, digest, ready_on_all
from lockstep.models import load_config, load_hf, read_vocab_size
from lockstep.placement import batch_spec, host_rows, parameter_axes, place_local
from lockstep.report import Row
from lockstep.text import Prompt, check_vocab, load_tokenizer
from lockstep.text.tokenize import chat_text, token_ids
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.rl.rewards import Reward, RewardConfig, labels
from lockstep.training.step.programs import Programs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@RewardConfig.register_subclass("model")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReward(RewardConfig):
    """The score of a reward model: a Hugging Face sequence classifier with one label, sharded as the policy is.

    It reads what TRL's trainers give it: question and answer through the chat template of its own tokenizer, or as
    texts one after the other. An answer that is too long for it has ``default``.
    """

    ON_DEVICES: ClassVar[bool] = True

    model: FilePath
    """The checkpoint with its tokenizer, a directory or a URL."""
    max_seq_len: int = 1024
    """Tokens of question and answer together, by its tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 2, "max_seq_len", block="rewards: model.")

    def build(self, max_new_tokens: int) -> Reward:
        """Return nothing that could be called: see `RewardModel`."""
        raise NotImplementedError("a reward model runs on the devices")


def score(model: Any, batch: Mapping[str, Array]) -> Float[Array, " row"]:
    """Return the score of each row at its last token, in float32, as ``AutoModelForSequenceClassification`` does.

    Args:
        model: What `load_hf` returned for a classifier.
        batch: The columns ``tokens`` ``[row, position]`` and ``last`` ``[row]``, the position of the last token.
    """
    states = model.activations(hax.named(batch["tokens"], ("batch", "position"))).rearrange(
        ("batch", "position", "embed")
    )
    last = jnp.take_along_axis(states.array, batch["last"][:, None, None], axis=1)[:, 0]
    head = model.lm_head_array().rearrange(("embed", "vocab")).array
    return jnp.dot(last, head, preferred_element_type=jnp.float32)[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RewardModel:
    """A reward model on the mesh, with its program."""

    name: str  # the name of its component
    config: ModelReward
    tokenizer: "PreTrainedTokenizerBase"
    model: PyTree
    program: LogprobProgram
    sharding: NamedSharding

    @classmethod
    def load(cls, name: str, config: ModelReward, trainer: TrainerConfig, programs: Programs) -> Self:
        """Read a reward model in the compute type, each device its part; every host makes this call.

        Raises:
            PeerError: A host could not read it, or it is no classifier with one label; raised on every host.
        """
        hosts, mesh = programs.hosts, programs.mesh
        hosts.phase(f"loading the reward model {name}")
        with hosts.run_on_all(f"reward model {name}"):
            tokenizer = load_tokenizer(config.model, trust_remote_code=None)
            check_vocab(tokenizer, read_vocab_size(config.model))
            shape = trainer.with_run_settings(load_config(config.model, scorer=True))
            if shape.max_seq_len < config.max_seq_len:
                raise ConfigError(
                    f"rewards: {name}.max_seq_len is {config.max_seq_len}, and {config.model} has sequences of "
                    f"{shape.max_seq_len} tokens. Lower it to at most {shape.max_seq_len}."
                )
        axes = {axis: place for axis, place in parameter_axes(mesh).items() if axis != "vocab"}
        dtype = trainer.precision.compute
        model = load_hf(config.model, mesh, axes, dtype, config=shape, hosts=hosts, scorer=True)
        program = LogprobProgram(f"reward_{name}", score, trainer=trainer, programs=programs, replicated=True)
        sharding = NamedSharding(mesh, batch_spec(mesh))
        return cls(name=name, config=config, tokenizer=tokenizer, model=model, program=program, sharding=sharding)

    def tokens(self, row: Row, prompt: Prompt) -> list[int] | None:
        """Return the tokens of a question and its answer; None where they are none that it can read."""
        try:
            if prompt.messages is None:
                text = f"{prompt.text}{row.generated_text}"
            else:
                answer = {"role": "assistant", "content": row.generated_text}
                text = chat_text(self.tokenizer, [*prompt.messages, answer])
            tokens = list(token_ids(self.tokenizer, [text], add_special_tokens=False)["input_ids"][0])
        except PromptError:
            return None
        return tokens if 0 < len(tokens) <= self.config.max_seq_len else None

    def scores(self, hosts: Hosts, answers: Sequence[tuple[Row, Prompt]]) -> list[float | None]:
        """Return the score of each answer, None where it has none; every host makes this call with the same answers.

        Raises:
            DisagreementError: The hosts have different rows, programs or scores; raised on every host.
        """
        rows = np.zeros((len(answers), self.config.max_seq_len), np.int32)
        last: Int[np.ndarray, " row"] = np.full(len(answers), -1, np.int32)
        with hosts.scope(f"reward model {self.name}") as scope:
            with scope.run_on_all("rows") as phase:
                for number, (row, prompt) in enumerate(answers):
                    if (tokens := self.tokens(row, prompt)) is not None:
                        rows[number, : len(tokens)], last[number] = tokens, len(tokens) - 1
                columns = {"tokens": rows, "last": np.maximum(last, 0)}
                structs = {
                    name: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=self.sharding)
                    for name, column in columns.items()
                }
                phase.agree({"rows": digest(rows.tobytes(), last.tobytes())})
                phase.agree(self.program.compile(self.model, structs))
            with scope.launch_on_all("scores", hosts.ledger) as computed:
                with ready_on_all(scope, "placing rows"):
                    own = host_rows(self.sharding, len(rows))
                    placed = {
                        name: place_local(column[own], self.sharding, len(rows)) for name, column in columns.items()
                    }
                scores = self.program.fetch(self.model, placed)
                computed.agree({"scores": digest(scores.tobytes())})
        readable = (last >= 0) & np.isfinite(scores)
        return [float(value) if is_score else None for value, is_score in zip(scores, readable, strict=True)]


def load_reward_models(
    rewards: Sequence[RewardConfig], trainer: TrainerConfig, programs: Programs
) -> list[RewardModel]:
    """Read the reward models of a run; every host makes this call."""
    named = zip(labels(rewards), rewards, strict=True)
    return [
        RewardModel.load(name, config, trainer, programs) for name, config in named if isinstance(config, ModelReward)
    ]
