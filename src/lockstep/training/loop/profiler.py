"""Profiler traces of some steps, which TensorBoard and Perfetto open."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.hosts import Hosts
from lockstep.printable import get_logger

log = get_logger(__name__)

_SUFFIXES: Final = (".xplane.pb", ".trace.json.gz")  # endings of the files that JAX writes, after the name of the host


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Which steps are traced, where."""

    start_step: int = 5
    """The first step of the trace, counted from 0; the first steps of a run compile."""
    num_steps: int = 25
    """The number of steps of the trace."""
    processes: tuple[int, ...] | None = (0,)
    """The numbers of the processes that trace what their own devices do; null: all of them. Their files are of one
    trace, where they share the disk."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.profiler.")
        check_at_least(self, 0, "start_step", block="trainer.profiler.")
        check_at_least(self, 1, "num_steps", block="trainer.profiler.")
        if self.processes is not None and (not self.processes or min(self.processes) < 0):
            raise ConfigError(
                f"trainer.profiler.processes is {list(self.processes)}; it lists process numbers from 0 on. Use [0] "
                "for the leader, null for all processes."
            )

    def check(self, num_train_steps: int) -> None:
        """Raise where the run ends before the trace does."""
        last = self.start_step + self.num_steps
        if last > num_train_steps:
            raise ConfigError(
                f"trainer.profiler asks for steps {self.start_step} to {last - 1}, but trainer.num_train_steps is "
                f"{num_train_steps}. Lower profiler.start_step or profiler.num_steps."
            )

    def check_processes(self, hosts: Hosts, goes_on: Callable[[], bool]) -> None:
        """Raise where a process is named that the job does not have, and would trace nothing.

        Args:
            goes_on: Whether the job is not at its first start: it may have had more processes, and the leader says so.

        Raises:
            ConfigError: There is one at a first start.
        """
        missing = sorted({process for process in self.processes or () if process >= hosts.count})
        if not missing:
            return
        mistake = (
            f"trainer.profiler.processes names {', '.join(map(str, missing))}, but the job has {hosts.count} "
            f"process{'es' * (hosts.count > 1)}, 0 to {hosts.count - 1}."
        )
        if not goes_on():
            raise ConfigError(f"{mistake} Leave them out, or use null for all processes.")
        if hosts.is_leader:
            log.warning("%s It goes on with fewer than it had: those that are there trace.", mistake)


class Profiler:
    """Traces the steps that the configuration names, on the processes that it names; elsewhere it does nothing.

    A process that cannot trace says so and trains on: nobody waits for a trace.

    Args:
        config: Which steps; None: none.
        directory: The directory that TensorBoard is pointed to. The trace is in ``plugins/profile/steps-A-B`` below it,
            with one file of each process, so that readers take it as one trace of several hosts.
    """

    def __init__(self, config: ProfilerConfig | None, directory: Path | None, process: int) -> None:
        traces = config is not None and (config.processes is None or process in config.processes)
        self._config, self._directory = config if traces else None, directory
        self._process, self._tracing = process, False

    def step(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Return a context for the launch of a step, after starting or ending the trace where it is time."""
        if self._config is None:
            return contextlib.nullcontext()
        due = self._config.start_step <= step < self._config.start_step + self._config.num_steps
        if due and not self._tracing:
            self._start()
        if self._tracing and not due:
            self.close()
        return jax.profiler.StepTraceAnnotation("train", step_num=step) if self._tracing else contextlib.nullcontext()

    def close(self) -> None:
        """End the trace, if there is one, and write it."""
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
            self._join()
            log.info("profiler trace written: tensorboard --logdir %s", self._directory)
        except Exception as error:  # the disk, the profiler's own library
            log.error("the profiler trace could not be written, training goes on: %s", error)

    @property
    def _own(self) -> Path:
        """The directory that the profiler writes to: it names its own after the second and the host."""
        assert self._directory is not None
        return self._directory / f".process-{self._process}"

    def _join(self) -> None:
        """Move what this process has traced to the trace of all, under its number."""
        assert self._config is not None and self._directory is not None
        first = self._config.start_step + 1
        trace = self._directory / "plugins" / "profile" / f"steps-{first}-{first + self._config.num_steps - 1}"
        trace.mkdir(parents=True, exist_ok=True)
        for suffix in _SUFFIXES:
            for file in sorted(self._own.rglob(f"*{suffix}")):
                file.replace(trace / f"process-{self._process:03}{suffix}")
        shutil.rmtree(self._own)

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(str(self._own))
            self._tracing = True
        except Exception as error:  # another trace is under way, the directory cannot be made
            log.error("the profiler could not start, training goes on without a trace: %s", error)
            self._config = None
