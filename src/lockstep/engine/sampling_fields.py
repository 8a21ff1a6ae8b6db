"""The fields that every configuration which samples has: ``sample``, ``inference_eval`` and ``rollout``."""

import dataclasses
from typing import Any, ClassVar, get_args

from lockstep.engine.config import CapacityFields, EngineConfig
from lockstep.engine.drafts import DraftSource
from lockstep.engine.sampling.filters import check_named_filters
from lockstep.errors import ConfigError, LockstepError
from lockstep.types import SamplingParams, SamplingRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields(SamplingRules):
    """The fields of sampling that a configuration has."""

    BLOCK: ClassVar[str] = ""
    """The key of the configuration block, for messages; empty where the fields are at the top level."""

    max_new_tokens: int = 64
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion; null: the tokenizer's end-of-sequence and end-of-turn tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end a completion, also where they straddle tokens; what is shown ends before the text."""
    drafts: DraftSource = "none"
    """Guess tokens and verify many of them in a step, where that is faster: ``last_round``, the last answers to the
    same prompt; ``ngram``, what followed the last tokens in prompt and answers before; ``auto``, both; ``none``. The
    tokens stay what they are, up to a near-tie that rounding decides (docs/drafts.md)."""

    def sampling_params(self, stop_ids: tuple[int, ...], round_: int = 0) -> SamplingParams:
        """The sampling parameters of every prompt of a round.

        Args:
            stop_ids: The tokenizer's stop tokens, used where ``stop_token_ids`` is null.
            round_: The round's number, which is added to the seed.

        Raises:
            ConfigError: A value is out of its range.
        """
        rules: dict[str, Any] = {each.name: getattr(self, each.name) for each in dataclasses.fields(SamplingRules)}
        return SamplingParams(
            **rules | {"seed": self.seed + round_},
            stop_token_ids=stop_ids if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop=tuple(self.stop),
        )

    def check_sampling(self) -> None:
        """Check the fields, and that each of them has an effect.

        Raises:
            ConfigError: A value is out of its range, or would do nothing beside another one.
        """
        prefix = f"{self.BLOCK}." if self.BLOCK else ""
        given: object = self.stop
        if isinstance(given, str):
            raise ConfigError(f"{prefix}stop is {given!r}; it must be a list of strings. Use [{given!r}].")
        if self.drafts not in get_args(DraftSource):
            raise ConfigError(
                f"{prefix}drafts is {self.drafts!r}; it must be one of {', '.join(get_args(DraftSource))}. Use none "
                "for plain decoding."
            )
        for name in self.FILTERS:
            if self.temperature == 0 and self.is_set(name):
                raise ConfigError(
                    f"{prefix}{name} is {getattr(self, name)} and temperature is 0, which is greedy: {name} would do "
                    f"nothing. Set temperature to more than 0, or remove {name}."
                )
        if self.ignore_eos and self.min_tokens:
            raise ConfigError(
                f"{prefix}min_tokens is {self.min_tokens} and ignore_eos is true: no stop token ends an answer, so "
                "min_tokens would do nothing. Remove one of the two."
            )
        try:
            check_named_filters(self.sampling_params(()).filter_values())
        except LockstepError as error:
            raise self.located(error) from None

    def located(self, error: LockstepError) -> LockstepError:
        """An error with the key of this block before its message.

        Args:
            error: An error about one of the fields.
        """
        return type(error)(f"{self.BLOCK}: {error}") if self.BLOCK else error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBlock(SamplingFields, CapacityFields):
    """A configuration block that samples with an engine of its own."""

    def engine_config(self, dtype: str | None, max_seq_len: int | None = None) -> EngineConfig:
        """The engine's part of the block: every field that has the name of one of `EngineConfig`.

        Args:
            dtype: The floating dtype to decode in; None: the dtype of the parameters.
            max_seq_len: The number of tokens of prompt and completion together; None: the block's own
                ``max_seq_len``, where it has one.

        Raises:
            ConfigError: A value is out of its range.
        """
        names = [each.name for each in dataclasses.fields(EngineConfig) if hasattr(self, each.name)]
        values: dict[str, Any] = {name: getattr(self, name) for name in names} | {"dtype": dtype}
        if max_seq_len is not None:
            values["max_seq_len"] = max_seq_len
        return EngineConfig(**values)

    def check_sampling(self) -> None:
        """Check the fields of sampling and those of the engine.

        Raises:
            ConfigError: A value is out of its range, or would do nothing beside another one.
        """
        super().check_sampling()
        try:
            self.engine_config(None)
        except LockstepError as error:
            raise self.located(error) from None
