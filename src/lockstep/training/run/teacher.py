"""The teacher of on-policy distillation: a checkpoint whose probabilities of the run's tokens are learned."""

from typing import TYPE_CHECKING

from jaxtyping import PyTree

from lockstep.errors import ConfigError
from lockstep.models import load_config, load_hf, read_vocab_size
from lockstep.placement import parameter_axes
from lockstep.text import load_tokenizer, token_count
from lockstep.training.loop.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_teacher(teacher: str, trainer: Trainer) -> PyTree:
    """Read a teacher in the compute type, each device its part; every host makes this call.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    trainer.hosts.phase("loading the teacher")
    model = trainer.config.with_run_settings(load_config(teacher))
    axes, dtype = parameter_axes(trainer.mesh), trainer.config.precision.compute
    return load_hf(teacher, trainer.mesh, axes, dtype, config=model, hosts=trainer.hosts)


def check_teacher(teacher: str, tokenizer: "PreTrainedTokenizerBase", row_length: int) -> None:
    """Refuse a teacher that cannot say how probable the tokens of a run are.

    Args:
        teacher: Its checkpoint, with its tokenizer.
        row_length: The tokens of a row.

    Raises:
        ConfigError: Its token ids are other ones, or its sequences are shorter.
    """
    own, teacher_ids = tokenizer.get_vocab(), load_tokenizer(teacher, trust_remote_code=None).get_vocab()
    differing = sorted((number, token) for token, number in own.items() if teacher_ids.get(token) != number)
    if differing:
        number, token = differing[0]
        raise ConfigError(
            f"teacher is {teacher}, whose tokenizer has {teacher_ids.get(token, 'no id')} for {token!r}, and tokenizer "
            f"has {number} ({len(differing)} tokens differ): its probabilities would be those of other tokens. Use a "
            "teacher of the same vocabulary."
        )
    rows, longest = read_vocab_size(teacher), load_config(teacher).max_seq_len
    if rows < token_count(tokenizer) or longest < row_length:
        raise ConfigError(
            f"teacher is {teacher}, of {rows} token ids and sequences of {longest} tokens, and the run has "
            f"{token_count(tokenizer)} and {row_length}. Use another teacher, or lower data.max_seq_len."
        )
