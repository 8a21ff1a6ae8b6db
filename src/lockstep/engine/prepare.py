"""From requests to programs that fit: chosen by prediction, compiled, and compared with the compiler's own figures."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from lockstep.engine.config import EngineConfig, layout_text
from lockstep.engine.decode_model import DecodeModel, DecodeModels, signature_of
from lockstep.engine.decoder.build import Programs, build_programs
from lockstep.engine.sampling.filters import check_named_filters, find_filter
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.memory_model import measured
from lockstep.engine.sizing.result import Sizing
from lockstep.engine.small_moves import can_follow
from lockstep.errors import ConfigError, HbmError, PromptError
from lockstep.hosts import Ledger
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement.device import Compile, compile_lowered
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Compiled programs, with the requests and the sizing that they were made for."""

    models: DecodeModels  # the model in every layout; without arrays
    sizing: Sizing
    programs: Programs
    excess: Mapping[str, int]  # bytes that the compiler was found to need beyond the prediction, by layout

    @property
    def model(self) -> DecodeModel:
        """The model in the layout in use."""
        return self.models[self.sizing.layout]


def models_for(
    config: EngineConfig, mesh: Mesh, model: tuple[LlamaConfig, DecoderWeights], before: Prepared | None
) -> tuple[DecodeModels, Prepared | None]:
    """The model in every layout, and what was prepared for it before.

    Args:
        model: What `lockstep.models.read_decoder` returned.

    Returns:
        The models of ``before`` and ``before`` itself where it was prepared for the same shapes, dtypes and placement,
        or small weights alone are placed elsewhere (`KnownModel`); else new ones and None.
    """
    if before is not None and can_follow(before.models.signature, signature_of(*model)):
        return before.models, before
    return DecodeModels(config, *model, mesh), None


def prepare_programs(
    config: EngineConfig,
    models: DecodeModels,
    requests: Sequence[Request],
    *,
    free: int,
    vocab_size: int | None,
    ledger: Ledger,
    before: Prepared | None = None,
    compile_with: Compile = compile_lowered,
) -> Prepared:
    """Choose layout and capacity, compile, and choose smaller ones where the compiler needs more than predicted.

    Launches nothing. Everything follows from the arguments and from compiled programs, which hosts agree on.

    Args:
        requests: At least one request; checked.
        free: Bytes on the device with the least free memory of all hosts.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows of the embedding.
        before: What was prepared for the same model earlier; returned unchanged if it does for these requests too.

    Raises:
        ConfigError: A capacity, layout or model cannot work.
        CapacityError: A request can never fit.
        CompilerError: A program does not compile.
    """
    excess = dict(before.excess) if before else {}
    while True:
        chooser = Chooser(config=config, models=models, free=free, excess=excess)
        sizing = chooser.choose(requests, before.sizing if before else None)
        if before is not None and sizing.layout == before.sizing.layout and sizing.sizes == before.sizing.sizes:
            if sizing.wanted == before.sizing.wanted:
                if sizing.max_prompts == before.sizing.max_prompts and excess == before.excess:
                    return before
                sizing = dataclasses.replace(before.sizing, max_prompts=sizing.max_prompts, reasons=sizing.reasons)
            return dataclasses.replace(before, sizing=sizing, excess=excess)
        try:
            programs = build_programs(
                models[sizing.layout], sizing.sizes, vocab_size=vocab_size, ledger=ledger, compile_with=compile_with
            )
        except HbmError as error:
            beyond = max(error.needed - error.limit, sizing.budget // 10)
        else:
            compiled = measured(programs)
            if compiled.total <= sizing.budget:
                sizing = dataclasses.replace(sizing, compiled=compiled)
                return Prepared(models=models, sizing=sizing, programs=programs, excess=excess)
            beyond = compiled.total - sizing.predicted.total
        # At least a hundredth of the budget more each time, so that this ends.
        name = layout_text(sizing.layout)
        excess[name] = max(beyond, excess.get(name, 0) + sizing.budget // 100 + 1)


def check_requests(requests: Sequence[Request], rows: int, vocab_size: int | None = None) -> None:
    """Refuse requests that a model cannot answer.

    Args:
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError: A prompt_id is used twice or out of range, a token that neither model nor tokenizer has is asked
            for, or nothing is left to sample.
        PromptError: A prompt has a token that the model does not have.
    """
    for _ in checked(requests, rows, vocab_size):
        pass


def checked(requests: Iterable[Request | None], rows: int, vocab_size: int | None = None) -> Iterator[Request | None]:
    """Yield requests one by one, each when it has been checked as `check_requests` checks all.

    Args:
        requests: Any number of requests, which may be read as they are needed; None is yielded as it is.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError, PromptError: See `check_requests`.
    """
    seen: set[int] = set()
    for request in requests:
        if request is None:
            yield None
            continue
        number = request.prompt_id
        if number in seen:
            raise ConfigError(
                f"prompt_id {number} is used by several requests; random draws depend on it. Number the prompts "
                "differently."
            )
        seen.add(number)
        if not 0 <= number < 2**32:
            raise ConfigError(
                f"prompt_id is {number}; it must be at least 0 and less than 2**32. Number the prompts differently."
            )
        for at, token in enumerate(request.prompt_tokens):
            if not 0 <= token < rows:
                raise PromptError(
                    f"token {at} of prompt {number} is {token}; the model's vocabulary has ids 0 to {rows - 1}. Use "
                    "the tokenizer that the model was trained with."
                )
        for token in request.params.stop_token_ids:
            # A token of the tokenizer that the embedding does not have is never sampled, and ends nothing.
            if not 0 <= token < max(rows, vocab_size or 0):
                raise ConfigError(
                    f"stop_token_ids of prompt {number} has {token}; the model's vocabulary has ids 0 to {rows - 1}, "
                    "so that it would never stop. Remove it, or use the tokenizer that the model was trained with."
                )
        _check_sampling(request, rows if vocab_size is None else min(vocab_size, rows))
        yield request


def _check_sampling(request: Request, vocab: int) -> None:
    number, params = request.prompt_id, request.params
    check_named_filters(params.filter_values())
    for name in params.filter_values():
        find_filter(name)
    tokens_of = {"logit_bias": [token for token, _ in params.logit_bias], "allowed_token_ids": params.allowed_token_ids}
    for name, tokens in tokens_of.items():
        for token in tokens or ():
            if not 0 <= token < vocab:
                raise ConfigError(
                    f"{name} of prompt {number} has {token}; the ids that can be sampled are 0 to {vocab - 1}. Remove "
                    "it, or use the tokenizer that the model was trained with."
                )
    if params.top_logprobs > vocab:
        raise ConfigError(
            f"top_logprobs of prompt {number} is {params.top_logprobs}; there are {vocab} tokens. Set it to at most "
            f"{vocab}."
        )
    if params.rules_out_stops and set(range(vocab)) <= set(params.stops):
        raise ConfigError(
            f"all {vocab} tokens are stop tokens of prompt {number} and min_tokens is {params.min_tokens}, so that "
            "none could be sampled. Remove a stop token, or set min_tokens to 0."
        )
