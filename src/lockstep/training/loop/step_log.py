"""The report of each step: throughput and figures for the tracker, a bar or lines for the user."""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.models import (
    LlamaConfig,
    LoraModel,
    UnreadableModelError,
    adapter_products,
    layer_products,
    read_decoder,
)
from lockstep.placement.device import published_chip
from lockstep.printable import write_to_stdout
from lockstep.report import Tracker
from lockstep.terminal import console
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.step.train_step import StepMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """The figures of one step.

    Args:
        mfu: The model's floating-point operations per second, as a fraction of the peak of all devices; None where
            either is not known.
    """

    rows: int
    tokens: int | None  # number of token positions of rows with tokens, masked ones too; None where it has no tokens
    step_s: float  # seconds from the launch of the step to its figures
    wait_s: float  # seconds before it in which the devices waited for the batch
    mfu: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, the wait for data included."""
        return None if self.tokens is None else self.tokens / (self.step_s + self.wait_s)

    def metrics(self) -> dict[str, float]:
        """Return the figures as a tracker gets them: ``throughput/…``, durations in seconds."""
        values = {
            "throughput/step_duration_s": self.step_s,
            "throughput/examples_per_s": self.rows / (self.step_s + self.wait_s),
            "throughput/data_wait_s": self.wait_s,
        }
        if self.tokens_per_s is not None:
            values["throughput/tokens_per_s"] = self.tokens_per_s
        if self.mfu is not None:
            values["throughput/mfu"] = self.mfu
        return values

    def __str__(self) -> str:
        parts = [] if self.tokens_per_s is None else [f"{self.tokens_per_s:,.0f} tokens/s"]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        return "  ".join([*parts, f"data wait {self.wait_s / (self.step_s + self.wait_s):.0%}"])


class Meter:
    """Measures the steps of a run."""

    def __init__(self, mesh: Mesh, model: Any) -> None:
        self._peak = peak_flops(mesh)
        self._shape: tuple[LlamaConfig, int] | None = None
        self._adapters: float | None = None
        with contextlib.suppress(UnreadableModelError):
            config, weights = read_decoder(model)
            self._shape = config, weights.embed.shape[0]
        if isinstance(model, LoraModel):
            self._adapters = adapter_products(model.pairs, model.config)

    def step(
        self, batch: Mapping[str, Any], *, step_s: float, wait_s: float, filled_rows: int | None = None
    ) -> Throughput:
        """Return the figures of a step.

        Args:
            batch: The global arrays of the batch; the positions of ``tokens`` ``[row, ..., position]`` are counted.
            filled_rows: The number of rows whose positions are counted; None for all.
        """
        rows = next(iter(batch.values())).shape[0]
        tokens = math.prod(batch["tokens"].shape) if "tokens" in batch else None
        if tokens is not None and filled_rows is not None:
            tokens = tokens // rows * filled_rows
        mfu = None
        if tokens is not None and self._shape is not None and self._peak:
            flops = tokens * flops_per_token(*self._shape, batch["tokens"].shape[-1], self._adapters)
            mfu = flops / (step_s + wait_s) / self._peak
        return Throughput(rows=rows, tokens=tokens, step_s=step_s, wait_s=wait_s, mfu=mfu)


def peak_flops(mesh: Mesh) -> float:
    """Return the published 16-bit operations per second of all devices of a mesh; 0 where one has no such number."""
    chips = [published_chip(device) for device in mesh.devices.flat]
    return sum(chip.flops for chip in chips if chip is not None) if all(chips) else 0.0


def flops_per_token(model: LlamaConfig, vocab_size: int, length: int, adapters: float | None = None) -> float:
    """Return the operations that training with one token needs, without those that rematerialisation repeats.

    They are 6 per weight of a matrix product, and 12 per layer, position and element of the query heads (PaLM,
    Chowdhery et al. 2022, arXiv 2204.02311, appendix B). The embedding is looked up, not multiplied. A frozen weight
    needs 4: it has no gradient.

    Args:
        adapters: The numbers of the adapters that a token is multiplied with, where they alone are trained; None where
            all weights are.
    """
    weights = layer_products(model) + model.hidden_dim * vocab_size
    products = 6.0 * weights if adapters is None else 4.0 * weights + 6.0 * adapters
    return products + 12.0 * sum(model.pair_products) * length


UNKNOWN = "–"


class ProgressDisplay:
    """The progress of a run: a bar at the bottom of a terminal, else a line every few seconds."""

    def __init__(self, total: int, every_s: float = 10.0) -> None:
        self._total, self._every_s, self._rate = total, every_s, Rate()
        self._shown_at, self._shown = float("-inf"), -1
        self._last: tuple[int, float | None, float, str] = (0, None, 0.0, "")
        self._bar: Progress | None = None
        if console().is_terminal:
            text = TextColumn("{task.fields[text]}", markup=False)
            columns = TextColumn("train"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn()
            self._bar = Progress(*columns, console=console())
            self._bar.add_task("train", total=total, text="")
            write_to_stdout(self._bar.start)

    def update(self, completed: int, loss: float | None, note: str = "") -> None:
        """Show the number of completed steps, the last loss (None: it says nothing), and the note."""
        self._last = (completed, loss, self._rate.add(completed), note)
        if self._bar is not None:
            bar, text = self._bar, _line_of(*self._last[1:])
            write_to_stdout(lambda: bar.update(bar.task_ids[0], completed=completed, text=text))
        elif time.monotonic() - self._shown_at >= self._every_s:
            self._show()

    def close(self) -> None:
        """Give the terminal back; print the last state unless it was printed already."""
        if self._bar is not None:
            write_to_stdout(self._bar.stop)
        elif self._shown != self._last[0]:
            self._show()

    def _show(self) -> None:
        completed, loss, rate, note = self._last
        eta = f"{_clock((self._total - completed) / rate)} left" if rate else "starting"
        # A line of a log is one line, however wide the console is taken to be.
        line = f"step {completed}/{self._total}  {_line_of(loss, rate, note)}  {eta}"
        write_to_stdout(lambda: console().print(line, soft_wrap=True))
        self._shown_at, self._shown = time.monotonic(), completed


class Rate:
    """Steps per second over the last steps."""

    def __init__(self, window: int = 50) -> None:
        self._times: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, completed: int) -> float:
        """Note that ``completed`` steps are done now; return steps per second, 0 while that is unknown."""
        self._times.append((time.monotonic(), completed))
        (start, first), (now, last) = self._times[0], self._times[-1]
        return (last - first) / (now - start) if last > first and now > start else 0.0


def _line_of(loss: float | None, rate: float, note: str) -> str:
    """The text of a step: loss, speed, and the note."""
    speed = number_text(rate or math.nan, 2)  # 0: it is not known yet
    parts = ["" if loss is None else f"loss {number_text(loss, 4)}", f"{speed} steps/s", note]
    return "  ".join(filter(None, parts))


def number_text(value: float, digits: int) -> str:
    """Return the number as text, a dash where there is none yet."""
    return f"{value + 0.0:.{digits}f}" if math.isfinite(value) else UNKNOWN  # -0.0 is 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class StepLog:
    """The report of steps on the leader; elsewhere it does nothing."""

    def __init__(
        self, total: int, tracker: Tracker, *, is_leader: bool, job: Mapping[str, float] | None = None
    ) -> None:
        self._tracker, self._job = tracker, job or {}
        self._progress = ProgressDisplay(total) if is_leader else None

    def step(self, info: StepInfo, metrics: StepMetrics, throughput: Throughput, note: str = "") -> None:
        """Report a step; a ``note`` of the source of the batches stands in place of loss and throughput."""
        if self._progress is None:
            return
        if note:
            self._progress.update(info.next_step, None, f"{note}, update {info.step_duration:.2f} s")
        else:
            self._progress.update(info.next_step, info.loss, str(throughput))
        values = {"train/loss": info.loss, **{f"train/{name}": value for name, value in metrics.values.items()}}
        self._tracker.log({**values, **throughput.metrics(), **self._job}, step=info.next_step)
        self._job = {}

    def close(self) -> None:
        """Show the last state and give the terminal back."""
        if self._progress is not None:
            self._progress.close()
