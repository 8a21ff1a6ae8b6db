"""What drafts promise on a slice: the bytes that a step moves per token, decoded and verified."""

import dataclasses
from collections.abc import Collection

from lockstep.engine import Engine
from lockstep.main.plan.traffic import step_bytes
from lockstep.models.attention import TpuAttention, select_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBytes:
    """One program that verifies drafts, beside the one that decodes.

    Args:
        width: The positions of a sequence in a step.
        bytes_per_accepted_token: The bytes per device that a step moves, by the tokens that it accepts of all sequences
            of a replica where every draft is right.
        bytes_per_decoded_token: The same of a decode step, which samples one token of each sequence.
        step_s: The predicted seconds of a step.
        tokens_per_s: The predicted tokens per second, on all devices of the mesh, where every draft is right.
    """

    width: int
    bytes_per_accepted_token: float
    bytes_per_decoded_token: float
    step_s: float
    tokens_per_s: float


def draft_bytes(engine: Engine, unmet: Collection[str]) -> list[DraftBytes]:
    """Return what each program that verifies moves; none without drafts, or where no kernel reads K and V in place.

    Args:
        engine: A prepared engine.
        unmet: The scopes of conditions that do not hold, see `Hlo`.
    """
    sizing, model = engine.sizing, engine.decode_model
    assert sizing is not None and model is not None
    sizes, predicted = sizing.sizes, sizing.estimate
    attention = select_attention(
        model.device, model.heads, page_size=sizes.page_size, dtype=model.dtype, kv_dtype=model.kv_dtype
    )
    if not sizes.verify_widths or not isinstance(attention, TpuAttention):
        return []
    context = int(next(each for each in sizing.considered if each.layout == sizing.layout).demand.context)

    def moved(name: str, block_pages: int, query_blocks: int, steps: int) -> float:
        found = step_bytes(
            engine.programs[name].text(),
            model,
            sizes,
            context=context,
            block_pages=min(block_pages, sizes.pages_per_sequence),
            query_blocks=query_blocks,
            unmet=unmet,
        )
        return found.compiled(steps) / sizes.slots

    decoded, blocks = moved("decode", attention.decode_blocks.pages, 1, sizes.steps), attention.prefill_blocks
    rows = []
    for width in sizes.verify_widths:
        seconds = predicted.verify_cost(width) * predicted.step_s
        step = moved(f"verify_{width}", blocks.pages, -(-width // blocks.queries), sizes.draft_tokens // width)
        rows.append(
            DraftBytes(
                width=width,
                bytes_per_accepted_token=step / width,
                bytes_per_decoded_token=decoded,
                step_s=seconds,
                tokens_per_s=predicted.active * width / seconds,
            )
        )
    return rows
