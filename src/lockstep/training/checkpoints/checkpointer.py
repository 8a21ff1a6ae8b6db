"""Saving on all hosts, with failures agreed on, and restoring: the checkpoints of a run."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from lockstep.errors import PeerError
from lockstep.hosts import Hosts
from lockstep.printable import error_text, get_logger
from lockstep.report import ReportWait
from lockstep.storage import call_storage, storage_wait
from lockstep.training.checkpoints.arrays import handler, merge_arrays, read_arrays, write_arrays
from lockstep.training.checkpoints.checkpoint import (
    CheckpointDirectory,
    CheckpointMetadata,
    DamagedCheckpointError,
    changes,
    named_arrays,
    shape_texts,
)
from lockstep.training.checkpoints.config import CheckpointerConfig
from lockstep.training.checkpoints.grace import ANSWER_S, Grace, answers
from lockstep.training.checkpoints.save import Save
from lockstep.training.checkpoints.search import SHARED_BY, CheckpointSearch, check_fits
from lockstep.training.step.train_state import TrainState
from lockstep.urls import check_bare_name

log = get_logger(__name__)

KEYS = "lockstep/checkpoint"
"""The directory of the service in which every process posts that its part is written, or why not."""

SLOW_S = 1.0  # seconds that training may wait for the save before, without a word in the log
LATE_S = 10.0  # seconds that training waits for the save before; then it goes on without another one


class Checkpointer:
    """Saves and restores the state of a run; every host makes the same calls after the same steps.

    A save copies the state to the memory of each host before it returns, and is written in the background. It counts
    once every host has said, over the coordination service, that its part is written. No host waits for another that
    failed, no device program is launched, and a failed save is logged, counted and left behind.

    Args:
        facts: What a run must have in common with a checkpoint to go on from it, by name.
        reported: Called on the leader, in a thread, before a checkpoint counts: returns whether what the run has
            reported so far is where it belongs, see `ReportWait`.
        model: What the checkpoints say of the model, see `model_spec`; None: nothing.
    """

    def __init__(
        self,
        config: CheckpointerConfig,
        path: str,
        hosts: Hosts,
        *,
        facts: Mapping[str, str],
        run_config: Mapping[str, Any],
        reported: Callable[[], bool],
        model: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.directory = CheckpointDirectory(path)
        self.errors = 0  # saves that failed, the same on every host
        self.last_step: int | None = None
        """The step of the newest checkpoint of this run; None where there is none yet. The same on every host."""
        self._hosts, self._facts, self._run_config = hosts, dict(facts), dict(run_config)
        self._reports = ReportWait(reported)
        self._model = model
        self.pending: Save | None = None  # the save that is under way
        self._grace = Grace(config.grace_s, self.directory.path, hosts)
        self._unfinished: CheckpointMetadata | None = None  # what the run went on from, if its hooks were to be called
        self._last_s: float | None = None
        self._search = CheckpointSearch(self.directory)
        handler()  # now, not in the first save, which would hold training up for a second

    def find(self, resume: Literal["auto", "must", "never"]) -> CheckpointMetadata | None:
        """Return the newest checkpoint that is not known to be damaged, after the leader has removed what interrupted
        saves have left.

        Args:
            resume: Whether there may, must or must not be one.

        Returns:
            Its metadata, the same on every host; None where there is none.

        Raises:
            PeerError: There is none or one against ``resume``, the hosts do not share the directory, or it cannot be
                used; all are damaged, or the newest is and ``resume`` is ``must``.
        """
        return self._search.find(self._hosts, resume)

    def restore(
        self, metadata: CheckpointMetadata, structs: TrainState
    ) -> tuple[TrainState, CheckpointMetadata] | None:
        """Read a checkpoint into this run's shardings, each host only what its devices hold. Launches nothing.

        Returns:
            The state, and the metadata with the arrays of hooks; None on every host where what one of them reads is
            damaged: `find` then returns an older one.

        Raises:
            PeerError: The checkpoint does not fit this run, or a host cannot read it.
        """
        directory, read, hooks = self.directory.of(metadata.step), dict[str, Any](), metadata.hooks
        doing = f"reading the checkpoint {directory}"
        with self._hosts.run_on_all("reading the checkpoint", doing) as phase:
            named = named_arrays(structs)
            check_fits(directory, metadata, self._facts, shape_texts(named))

            def read_all() -> tuple[dict[str, Any], Mapping[str, Any]]:
                arrays = read_arrays(directory / metadata.arrays, named, metadata.tree_digest)
                return arrays, self.directory.hooks(metadata)

            try:
                read, hooks = call_storage(
                    doing,
                    read_all,
                    0.8 * self._hosts.timeout_s,
                    answers=lambda: answers(self.directory.path / SHARED_BY, ANSWER_S),
                )
            except DamagedCheckpointError as error:
                phase.share(str(error))
        if damage := [f"process {index}: {text}" for index, text in enumerate(phase.shared) if text]:
            self._search.damaged[metadata.step] = "; ".join(damage)
            return None
        if self._hosts.is_leader:
            for line in changes(metadata.config, self._run_config):
                log.warning("the run goes on with another configuration than at step %d: %s", metadata.step, line)
            log.info("the run goes on from step %d: %s", metadata.step, directory)
        self.last_step, self._unfinished = metadata.step, None if metadata.hooks_called else metadata
        state = jax.tree.unflatten(jax.tree.structure(structs), [read[name] for name in named])
        return state, dataclasses.replace(metadata, hooks=hooks)

    def save(
        self,
        state: TrainState,
        *,
        step: int,
        loss: float,
        hooks: Mapping[str, Any],
        hooks_called: bool,
        is_last: bool = True,
    ) -> None:
        """Begin a checkpoint, after the one before has come to its end.

        Where this step has one, its arrays stay, and it says from now on that its hooks have been called, if they have.

        Args:
            state: The state after the step. It may be donated as soon as this returns.
            hooks_called: Whether the hooks have been called for this step.
            is_last: Whether no other follows; where one does, this one is left out if the one before is late.
        """
        start = time.monotonic()
        if not self.wait(at_most_s=math.inf if is_last else LATE_S):
            return
        if step == self.last_step:
            unfinished, self._unfinished = self._unfinished, None
            if unfinished is not None and unfinished.step == step and hooks_called:
                self._note_hooks(dataclasses.replace(unfinished, hooks=hooks, hooks_called=True))
            return
        if (waited_s := time.monotonic() - start) > SLOW_S and self._hosts.is_leader:
            log.warning("training waited %.1f s for the save before this one: raise checkpointer.every", waited_s)
        named = named_arrays(state)
        try:
            with self._hosts.scope("checkpoint") as scope, scope.run_on_all("beginning a checkpoint") as phase:
                if scope.is_leader:
                    self._search.wait_removed(step, scope.timeout_s / 2)
                    phase.share(self.directory.begin(step))
        except PeerError as error:
            self._count_failure(step, str(error))
            return
        metadata = CheckpointMetadata(
            step=step,
            loss=loss,
            arrays=check_bare_name(phase.shared[0], "process 0"),
            shapes=shape_texts(named),
            facts=self._facts,
            config=self._run_config,
            hooks=hooks,
            hooks_called=hooks_called,
            model=self._model,
        )
        self.pending = Save(metadata, named, self.directory.of(step))
        threading.Thread(target=self._write, args=(self.pending,), name="lockstep-checkpoint", daemon=True).start()
        self.pending.copied.wait()

    def _note_hooks(self, metadata: CheckpointMetadata) -> None:
        """Say in a checkpoint that the run has gone on from that the hooks of its step have been called since."""
        self._reports.training_waits(True)
        try:
            with self._hosts.scope("checkpoint") as scope, scope.run_on_all("noting the hooks of a checkpoint"):
                if scope.is_leader:
                    self._reports(metadata.step)
                    doing = f"writing {self.directory.of(metadata.step)}"
                    call_storage(doing, lambda: self.directory.commit(metadata), scope.timeout_s / 2)
        except PeerError as error:
            self._count_failure(metadata.step, str(error))
        finally:
            self._reports.training_waits(False)

    def wait(self, *, removal: bool = True, at_most_s: float = math.inf) -> bool:
        """Wait on all hosts, at most until its time is over, for the end of a save, and for the removal of old ones.

        Args:
            at_most_s: The seconds after which training goes on while it is written; none are waited another time.

        Returns:
            Whether no save is under way; the same on every host.
        """
        save = self.pending
        if save is None:
            return True
        deadline = time.monotonic() + (0.0 if save.late and at_most_s < math.inf else at_most_s)
        outcome: str | None = None
        self._reports.training_waits(True)
        waiting = storage_wait(str(save)) if self._hosts.is_leader else contextlib.nullcontext()
        try:
            with waiting:
                while outcome is None:
                    # A slice at a time, so that no host waits longer for another than it may.
                    with self._hosts.scope("checkpoint end") as scope:
                        with scope.run_on_all("ending a checkpoint", str(save)) as end:
                            end.share((None, False, False))
                            if scope.is_leader:
                                slice_s = min(scope.timeout_s / 4, deadline - time.monotonic())
                                outcome = self._outcome(save, save.ended if removal else save.done, slice_s)
                                end.share((outcome, time.monotonic() >= deadline, self._grace.storage_is_silent))
                    outcome, save.late, self._grace.storage_is_silent = end.shared[0]
                    if outcome is None and save.late:
                        self._say_late(save)
                        return False
        finally:
            self._reports.training_waits(False)
        self.pending = None
        if outcome:
            save.give_up()
            self._count_failure(save.step, outcome)
        else:
            self.last_step = save.step
        return True

    def _say_late(self, save: Save) -> None:
        if self._hosts.is_leader:
            fix = "Raise checkpointer.every if that is the time a save takes"
            not_complete = f"{save}, is not complete after {save.seconds:.0f} s"
            log.warning("training goes on without another checkpoint: %s. %s", not_complete, fix)

    def save_after_signal(self, state: TrainState, *, step: int, **values: Any) -> None:
        """`save` after SIGTERM, unless one that was under way then is complete and no time for another is left."""
        pending = self.pending
        self._grace.age_s()
        self.wait(removal=False)
        if self._grace.storage_is_silent:
            return
        if pending is not None and pending.step == self.last_step != step:
            age_s = self._grace.age_s()
            with self._hosts.run_on_all("time for another save") as phase:
                phase.share(self._last_s or 0.0)  # the leader's counts
            left_s, needed_s = self.config.grace_s - age_s, phase.shared[0]
            if needed_s > left_s:
                if self._hosts.is_leader:
                    log.warning(
                        "the checkpoint of step %d, which was being written at SIGTERM, is the last: a save takes "
                        "%.1f s, and of %g s (checkpointer.grace_s) %.1f s are left. Lost, and done again by the next "
                        "start: %d step(s) after it",
                        pending.step,
                        needed_s,
                        self.config.grace_s,
                        max(left_s, 0.0),
                        step - pending.step,
                    )
                return
        self.save(state, step=step, **values)

    @contextlib.contextmanager
    def within_grace(self, step: int) -> Iterator[None]:
        """Warn on the leader where a save that SIGTERM asked for may not fit in the time left; no report has any."""
        before, age_s = self.last_step, self._grace.age_s()
        if not self._hosts.is_leader:
            yield
            return
        self._reports.signalled()
        start = time.monotonic() - age_s

        def written() -> int:
            return step if self.pending is None else self.pending.step

        with self._grace.warnings(age_s, self._last_s, written, self._otherwise):
            yield
        if self.last_step != before:
            log.info("saved %.1f s after SIGTERM, which leaves %g s", time.monotonic() - start, self.config.grace_s)

    def _otherwise(self) -> str:
        """The checkpoint that a run would go on from if the save under way is not completed."""
        pending, step = self.pending, self.last_step
        if pending is not None and pending.done.is_set() and not pending.error:
            step = pending.step
        return "from the beginning" if step is None else f"from step {step}"

    def _outcome(self, save: Save, end: threading.Event, wait_s: float) -> str | None:
        """On the leader: why the save failed, empty where it did not, None while nobody knows."""
        give_up_at = time.monotonic() - save.seconds + self.config.timeout_s
        wait_until = min(time.monotonic() + wait_s, give_up_at, self._grace.probe_at)
        if end.wait(max(0.0, wait_until - time.monotonic())):
            return save.error
        if time.monotonic() >= give_up_at:
            if save.done.is_set():
                return save.error
            return f"it was not complete after {self.config.timeout_s:g} s (checkpointer.timeout_s)"
        if self._grace.probe():
            return (
                f"{self.directory.path} does not answer, and the {self.config.grace_s:g} s that SIGTERM leaves "
                "(checkpointer.grace_s) are over"
            )
        return None

    def _count_failure(self, step: int, why: str) -> None:
        self.errors += 1
        if self._hosts.is_leader:
            log.error("the checkpoint of step %d was not saved, training goes on: %s", step, why)

    def _write(self, save: Save) -> None:
        """The thread of a save: this host's part, and on the leader the end of the whole."""
        with jax.no_execution(True):
            try:
                try:
                    wait = write_arrays(self.directory.of(save.step) / save.metadata.arrays, save.take_arrays())
                finally:
                    save.copied.set()
                wait()
                failure = ""
            except Exception as error:
                failure = _text(error)
            try:
                key = f"{KEYS}/{save.metadata.arrays}"
                self._hosts.client.set(f"{key}/{self._hosts.index}", failure.encode())
                if self._hosts.is_leader:
                    save.error = self._complete(save, key)
            except Exception as error:
                save.error = _text(error)
            save.done.set()
            if self._hosts.is_leader and not save.error:
                self._remove_old()
            save.ended.set()

    def _complete(self, save: Save, key: str) -> str:
        """On the leader: wait for all, then make it a checkpoint; say why where that fails."""
        client, pause_s = self._hosts.client, 0.01
        while len(posted := client.get_dir(key)) < self._hosts.count:
            if save.given_up.wait(pause_s):
                break
            pause_s = min(1.0, pause_s * 1.3)
        client.delete(key)
        failures = {int(name.rpartition("/")[2]): text.decode() for name, text in posted.items() if text}
        if failures:
            self._discard(save)
            return "; ".join(f"process {index}: {text}" for index, text in sorted(failures.items()))
        if save.given_up.is_set():
            return "given up"
        try:
            tree_digest = merge_arrays(self.directory.of(save.step) / save.metadata.arrays)
            begin = time.monotonic()
            self._reports(save.step)
            reports_s = time.monotonic() - begin
            if save.given_up.is_set():
                raise TimeoutError("given up")
            self.directory.commit(dataclasses.replace(save.metadata, tree_digest=tree_digest))
        except Exception:
            self._discard(save)
            raise
        self._hosts.note_saved()
        self._search.damaged.pop(save.step, None)  # this one is there in its place
        self._last_s = save.seconds - reports_s
        log.info("checkpoint %s saved in %.1f s", self.directory.of(save.step), save.seconds)
        return ""

    def _remove_old(self) -> None:
        try:
            # A damaged one stays, and is none of the newest.
            for step in self.config.keep.removed([s for s in self.directory.steps() if s not in self._search.damaged]):
                self.directory.discard(step)
        except Exception as error:  # storage libraries have their own
            log.warning("%s cannot be listed, so old checkpoints stay: %s", self.directory.path, error)

    def _discard(self, save: Save) -> None:
        """Remove what a failed save has written; a damaged checkpoint of its step stays."""
        damaged = save.step in self._search.damaged
        self.directory.discard(save.step, save.metadata.arrays if damaged else None)


def _text(error: Exception) -> str:
    """The beginning of an error's text: tensorstore adds pages to it."""
    return error_text(error, 400)
