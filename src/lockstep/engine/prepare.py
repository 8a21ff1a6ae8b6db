"""Programs that fit: chosen by prediction, compiled, and compared with the compiler's own figures."""

import dataclasses
from collections.abc import Mapping

from lockstep.engine.config import layout_text
from lockstep.engine.decode_model import DecodeModel, DecodeModels
from lockstep.engine.decoder.build import Programs, build_programs
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.memory_model import measured
from lockstep.engine.sizing.result import Sizing
from lockstep.errors import HbmError
from lockstep.hosts import Ledger
from lockstep.placement.device import Compile, compile_lowered


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


def prepare_programs(
    chooser: Chooser,
    *,
    vocab_size: int | None,
    ledger: Ledger,
    before: Prepared | None = None,
    compile_with: Compile = compile_lowered,
) -> Prepared:
    """Choose layout and capacity, compile, and choose smaller ones where the compiler needs more than predicted.

    Launches nothing. Everything follows from the arguments and from compiled programs, which hosts agree on.

    Args:
        chooser: Chooses for the requests, at least one and checked, and knows the excess of ``before``.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows of the embedding.
        before: What was prepared for the same model earlier; returned unchanged if it does for these requests too.

    Raises:
        ConfigError: A capacity, layout or model cannot work.
        CapacityError: A request can never fit.
        CompilerError: A program does not compile.
    """
    while True:
        sizing = chooser.choose(before.sizing if before else None)
        if before is not None and sizing.layout == before.sizing.layout and sizing.sizes == before.sizing.sizes:
            if sizing.wanted == before.sizing.wanted:
                if sizing.max_prompts == before.sizing.max_prompts and chooser.excess == before.excess:
                    return before
                sizing = dataclasses.replace(before.sizing, max_prompts=sizing.max_prompts, reasons=sizing.reasons)
            return dataclasses.replace(before, sizing=sizing, excess=chooser.excess)
        try:
            model = chooser.models[sizing.layout]
            programs = build_programs(
                model, sizing.sizes, vocab_size=vocab_size, ledger=ledger, compile_with=compile_with
            )
        except HbmError as error:
            beyond = max(error.needed - error.limit, sizing.budget // 10)
        else:
            compiled = measured(programs)
            if compiled.total <= sizing.budget:
                sizing = dataclasses.replace(sizing, compiled=compiled)
                return Prepared(models=chooser.models, sizing=sizing, programs=programs, excess=chooser.excess)
            beyond = compiled.total - sizing.predicted.total
        # At least a hundredth of the budget more each time, so that this ends.
        name = layout_text(sizing.layout)
        beyond = max(beyond, chooser.excess.get(name, 0) + sizing.budget // 100 + 1)
        chooser = dataclasses.replace(chooser, excess={**chooser.excess, name: beyond})
