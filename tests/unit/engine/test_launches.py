"""What the loop over launches does and when, with programs that only take notes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.decoder.build import Programs
from lockstep.engine.gate import Gate
from lockstep.engine.launches import launch_all
from lockstep.engine.schedule import DecodeResults, Scheduler
from lockstep.models import DecoderWeights
from lockstep.placement import make_decode_mesh
from lockstep.placement.device import Program
from lockstep.types import FinishReason
from tests.unit.engine.models import mesh_of
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


class Notes:
    """Programs, gate, scheduler's work and callback in one list of what happened, in order."""

    def __init__(self, **scheduler: Any) -> None:
        self.capacity = capacity_of(slots=2, sequences=2, steps=4)
        self.seen: list[str] = []
        self.scheduler = Scheduler(self.capacity, [request(i, 3, 6) for i in range(3)], **scheduler)
        for name in ("work_ahead", "commit"):
            setattr(self.scheduler, name, self._noted(name.replace("_", " "), getattr(self.scheduler, name)))

    def _noted(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            self.seen.append(what)
            return work(*given)

        return noted

    def prefill(self, weights: Any, pool: Any, given: Any) -> Any:
        self.seen.append("prefill")
        return pool

    def decode(self, weights: Any, pool: Any, given: Any) -> Any:
        self.seen.append("decode")
        # One word for the number of steps, then two each, for the two slots, of token, position and remaining.
        steps, remaining = int(given[0, 0]), np.asarray(given)[:, 5:7]
        tokens = np.where(np.arange(4) < np.minimum(remaining, steps)[..., None], 1, -1).astype(np.int32)
        return pool, jnp.asarray(DecodeResults.of(tokens, np.zeros(tokens.shape, np.float32)).packed)

    @property
    def gate(self) -> Any:
        """A gate that raises another error for an error."""

        def gate(error: Exception | None, *, done: bool = False) -> None:
            self.seen.append(f"gate {error or ''}{'done' if done else ''}".strip())
            if error is not None:
                raise RuntimeError("known to all") from error

        return mock.Mock(spec=Gate, side_effect=gate)

    @contextlib.contextmanager
    def around(self, program: str) -> Iterator[None]:
        yield
        self.seen.append(f"end of {program}")

    def run(self, **options: Any) -> None:
        """The loop, from the first launch to the last."""
        decode = mock.Mock(spec=Program, side_effect=self.decode)
        decode.name = "decode"
        programs = mock.Mock(spec=Programs, prefill=self.prefill, decode=decode)
        weights, mesh = mock.Mock(spec=DecoderWeights), make_decode_mesh(mesh_of("1,1,1"), 1)
        options = {"around_launch": self.around, **options}
        for _ in launch_all(programs, weights, jnp.zeros(1), self.scheduler, mesh, **options):
            self.seen.append("yield")


def test_the_gate_is_the_last_thing_before_a_launch() -> None:
    notes = Notes()
    notes.run(gate=notes.gate, between_launches=lambda _: notes.seen.append("callback"))
    first = ["callback", "gate", "prefill", "end of prefill", "callback", "gate", "decode", "work ahead"]
    assert notes.seen[:8] == first
    assert notes.seen[8:12] == ["end of decode", "commit", "callback", "gate"]
    assert notes.seen[-3:] == ["callback", "gate done", "yield"]
    launches = [at for at, what in enumerate(notes.seen) if what in ("decode", "prefill")]
    assert all("gate" in notes.seen[at - 2 : at] for at in launches)
    assert [len(c.tokens) for c in notes.scheduler.completions()] == [6, 6, 6]


@pytest.mark.parametrize("what", ["commit", "work_ahead", "next_batch", "callback"])
def test_an_error_goes_to_the_gate_and_nothing_is_launched_after_it(what: str) -> None:
    notes = Notes()

    def fail(*_: Any) -> None:
        if "decode" in notes.seen:
            raise ValueError("broken")

    if what != "callback":
        before = getattr(notes.scheduler, what)
        setattr(notes.scheduler, what, lambda *given: (fail(), before(*given))[1])
    with pytest.raises(RuntimeError, match="known to all") as raised:
        notes.run(gate=notes.gate, between_launches=fail if what == "callback" else None)
    assert isinstance(raised.value.__cause__, ValueError)
    assert notes.seen.count("decode") == 1 and notes.seen[-1].startswith("gate broken")


def test_without_a_gate_an_error_is_the_callers() -> None:
    notes = Notes()
    with pytest.raises(ZeroDivisionError):
        notes.run(between_launches=lambda _: 1 / 0)
    assert notes.seen == []


def test_a_reason_to_stop_ends_the_run_with_what_there_is() -> None:
    notes = Notes()
    reasons = iter([None, None, FinishReason.BUDGET])
    notes.run(gate=mock.Mock(spec=Gate, side_effect=reasons))
    assert notes.seen.count("decode") == 1
    assert [(len(c.tokens), c.finish_reason) for c in notes.scheduler.completions()] == [
        (4, FinishReason.BUDGET), (4, FinishReason.BUDGET), (0, FinishReason.BUDGET),
    ]  # fmt: skip
