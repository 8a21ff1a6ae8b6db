"""Operations on a job that was started before: its status, its logs, its end."""

import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.exits import DONE, INTERRUPTED, UNREACHABLE, WORKER_LOST, describe_code
from lockstep.files import private
from lockstep.launch.backend import Console, LaunchError, Lines, Transport, WorkerBackend, root_on_worker
from lockstep.launch.connection import Connection, DroppedError, answered, call
from lockstep.launch.end_request import ask_to_end
from lockstep.launch.failure import Ending, failed_by_their_logs, first_failure
from lockstep.launch.follower import Followers
from lockstep.launch.job_loop import ASKED
from lockstep.launch.prepare import on_all
from lockstep.launch.record import Attempt, JobRecord, find_record, kept_logs
from lockstep.printable import printable, without_credentials

MARGIN_S = 20.0  # seconds beyond its grace in which a job must have ended


class StartedJob:
    """The last attempt of a job."""

    def __init__(self, backend: WorkerBackend, job: JobRecord) -> None:
        self._backend, self._job = backend, job
        self._options = job.namespace()
        self._console = Console(log=job.directory / "launcher.log")

    def _last(self) -> Attempt:
        if not self._job.attempts:
            raise LaunchError(f"job {self._job.name!r} was never started; its record is in {self._job.directory}.")
        # One that was refused has not been on the workers, where an earlier one may still run.
        return next((attempt for attempt in reversed(self._job.attempts) if attempt.launched), self._job.attempts[-1])

    def _call(self, transport: Transport, worker: int, **request: Any) -> dict[str, Any]:
        """`call`, with the reason under ``unreachable`` where there is no answer."""
        try:
            return call(transport, worker, {"root": root_on_worker(self._job.name, worker), **request})
        except DroppedError as error:
            return {"state": "unreachable", "unreachable": str(error)}

    def status(self) -> int:
        """Print a line for each worker."""
        attempt, job = self._last(), self._job
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started))
        command = without_credentials(" ".join(job.command))
        print(printable(f"job {job.name} ({job.backend}), attempt {attempt.number}, started {begun}: {command}"))
        transport = self._backend.find(self._options)
        states = on_all(transport, lambda index: self._call(transport, index, op="status", attempt=attempt.id))
        for index, (worker, state) in enumerate(zip(transport.workers, states, strict=True)):
            print(f"[{index}] {worker.name}: {_in_words(state)}")
        self._note_end(transport, states)
        print(f"logs: {job.log(attempt.number, 0).parent} (lockstep launch logs {job.name})")
        known = self._last().code
        if known is None:
            kinds = {state["state"] for state in states}
            return UNREACHABLE if "unreachable" in kinds else DONE
        print(printable(f"it has ended: {describe_code(known)}. {self._last().cause}".rstrip()))
        return known

    def _note_end(self, transport: Transport, states: list[dict[str, Any]]) -> None:
        """Write into the record how the attempt has ended, where it has on all workers and that was not known."""
        attempt = self._last()
        if attempt.code is not None or not all(state["state"] in ("ended", "lost") for state in states):
            return
        self._fetch_from_all(transport, attempt)
        endings = [
            Ending(worker=index, code=state["code"], at=state["ended"], reason=state["reason"])
            if state["state"] == "ended"
            else Ending(worker=index, code=WORKER_LOST, at=time.time(), reason="its processes are gone")
            for index, state in enumerate(states)
        ]
        failed = {ending.worker for ending in endings if ending.code != DONE}
        logs = [log for log in kept_logs(self._job.directory, attempt.number) if log[1] in failed]
        themselves = failed_by_their_logs(logs)
        cause = first_failure(endings, unreachable=False, all_ended=True, waited_s=0.0, themselves=themselves)
        text = f"worker {transport.workers[cause.worker].name} failed first. {cause.reason}".strip() if cause else ""
        ended = max(ending.at for ending in endings)
        self._job = self._job.with_attempt(
            dataclasses.replace(attempt, ended=ended, code=cause.code if cause else DONE, cause=text)
        )
        self._job.save()

    def logs(self, *, follow: bool) -> int:
        """Print what is kept here and what is new on the workers; with ``follow`` until the command has ended."""
        attempt = self._last()
        if self._job.deleted:
            return self._print_kept(attempt)
        try:
            transport = self._backend.find(self._options)
        except LockstepError as error:
            self._print_kept(attempt)
            if follow or attempt.code is None:
                raise
            self._console.say(f"its workers cannot be found: {error}")
            return DONE
        if not follow:
            self._fetch_from_all(transport, attempt)
            return self._print_kept(attempt)
        try:
            return self._follow(transport, attempt)
        except KeyboardInterrupt:
            self._console.say(f"no longer followed; job {self._job.name} goes on")
            return INTERRUPTED

    def _print_kept(self, attempt: Attempt) -> int:
        for _, index, path in kept_logs(self._job.directory, attempt.number):
            lines = self._lines(index)
            lines.feed(path.read_bytes())
            lines.end()
        return DONE

    def _lines(self, index: int) -> Lines:
        """A printer of the lines of a worker."""
        return Lines(functools.partial(self._console.line, index))

    def _follow(self, transport: Transport, attempt: Attempt) -> int:
        """Print the logs of all workers until the command has ended, and add to the files here what is new."""
        count = len(transport.workers)
        lines, offsets = [self._lines(index) for index in range(count)], [0] * count
        for _, index, path in kept_logs(self._job.directory, attempt.number):
            data = path.read_bytes()
            if index < count:
                offsets[index] = len(data)
            (lines[index] if index < count else self._lines(index)).feed(data)
        roots = [root_on_worker(self._job.name, index) for index in range(count)]
        followers = Followers(transport, attempt.id, roots, offsets, [None] * count)
        states: dict[int, dict[str, Any]] = {}
        try:
            followers.start()
            while len(states) < count:
                for follower in followers.by_worker:
                    follower.tick()
                for event in followers.events(0.1):
                    index = event.worker
                    if event.kind == "output":
                        offsets[index] = keep(self._job.log(attempt.number, index), offsets[index], event.data)
                        lines[index].feed(event.data)
                    elif event.kind == "dropped":
                        self._console.once(f"worker {transport.workers[index].name} cannot be reached: {event.text}")
                    elif event.kind == "result":
                        lines[index].end()
                        states[index] = {"state": "lost", **event.result}
        finally:
            followers.finish()
        self._note_end(transport, [states[index] for index in range(count)])
        return self._last().code or DONE

    def _fetch_from_all(self, transport: Transport, attempt: Attempt) -> None:
        """Add to the files here what is new on the workers, as far as they can be reached."""
        for failure in on_all(transport, lambda index: self._fetch(transport, index, attempt)):
            if failure:
                self._console.say(failure)

    def _fetch(self, transport: Transport, index: int, attempt: Attempt) -> str:
        """Add to the file here what is new on a worker; the reason why that cannot be done, or ""."""
        name, path = transport.workers[index].name, self._job.log(attempt.number, index)
        offset = path.stat().st_size if path.exists() else 0
        place = {"root": root_on_worker(self._job.name, index), "attempt": attempt.id}
        request = {**place, "op": "follow", "start": None, "offset": offset, "wait": False}
        connection = Connection(transport, index, request, stays=True)
        try:
            for kind, data in connection.frames():
                if kind == "O":
                    offset = keep(path, offset, data)
                elif kind == "R" and (error := answered(data, "follow").get("error")):
                    return f"worker {name}: {error}"
        except DroppedError as dropped:
            return f"worker {name} cannot be reached: {dropped}"
        finally:
            connection.close()
        return ""

    def stop(self) -> int:
        """End the command on all workers, and say how it ended."""
        grace = float(self._options.grace_s)
        ask_to_end(self._job, "stop")
        transport = self._backend.find(self._options)
        attempt = self._last()
        self._console.say(f"stopping {self._job.name}; its processes have {grace:g} s to save")
        answers = on_all(transport, lambda index: self._end_on(transport, index, "clear", grace + MARGIN_S))
        states = on_all(transport, lambda index: self._call(transport, index, op="status", attempt=attempt.id))
        for index, (worker, state) in enumerate(zip(transport.workers, states, strict=True)):
            print(f"[{index}] {worker.name}: {_in_words(state)}")
        self._note_end(transport, states)
        return UNREACHABLE if any("unreachable" in answer for answer in answers) else DONE

    def delete(self) -> int:
        """Stop the job, remove its files from the workers, and give back the workers; its logs here stay."""
        ask_to_end(self._job, "delete")
        left = False  # whether the command may still run
        try:
            transport = self._backend.find(self._options)
        except LaunchError as error:  # workers that are gone need no stop
            self._console.say(f"its workers cannot be found: {error}")
        else:
            # Before anything is ended or given back: somebody else's job of this name is an error here.
            on_all(transport, lambda index: self._end_on(transport, index, "clear", 0.0, how=""))
            ends = on_all(transport, lambda index: self._delete_on(transport, index))
            failures = [failure for failure in ends if failure]
            for failure in failures:
                self._console.say(failure)
            left = bool(failures)
        self._backend.release(self._options, self._console)
        if left and self._has_workers():
            self._console.say(
                f"{self._job.name} is not deleted: its command may still run there. Delete it again once every worker "
                f"can be reached; where one is gone for good, remove {self._job.directory} to forget the job."
            )
            return UNREACHABLE
        job = find_record(self._job.name) or self._job  # with the end that its launcher may have noted by now
        dataclasses.replace(job, deleted=True).save()
        self._console.say(f"deleted {self._job.name}; its logs stay in {self._job.directory}")
        return DONE

    def _delete_on(self, transport: Transport, index: int) -> str:
        """Stop the job on a worker, keep its logs and remove its files; the reason why that cannot be done, or ""."""
        limit_s = float(self._options.grace_s) + MARGIN_S
        try:
            answer = self._end_on(transport, index, "clear", limit_s)
            if "unreachable" not in answer:
                for attempt in self._job.attempts:
                    # Whoever has noted an end has first kept what was printed.
                    if attempt.code is None or attempt == self._last():
                        if failure := self._fetch(transport, index, attempt):
                            return failure
                answer = self._end_on(transport, index, "delete", limit_s)
        except LaunchError as error:
            return str(error)
        away = answer.get("unreachable")
        return f"worker {transport.workers[index].name} cannot be reached: {away}" if away else ""

    def _end_on(
        self, transport: Transport, index: int, operation: str, timeout_s: float, how: str = "stop"
    ) -> dict[str, Any]:
        """End the attempts of the record on a worker, those that its launcher may have added by now too."""
        job = find_record(self._job.name) or self._job
        attempts = [attempt.id for attempt in job.attempts]
        return self._call(transport, index, op=operation, how=how, timeout_s=timeout_s, attempts=attempts)

    def _has_workers(self) -> bool:
        """Whether there are workers, as far as the backend can say."""
        try:
            self._backend.find(self._options)
        except LaunchError as error:
            return error.code == UNREACHABLE
        return True


def keep(path: Path, offset: int, data: bytes) -> int:
    """Write what a worker has printed to the place that it has in the worker's file; return the place after it.

    Whoever else keeps it at the same time writes the same there.
    """
    with open(private(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.seek(offset)
        file.write(data)
    return offset + len(data)


def _in_words(state: dict[str, Any]) -> str:
    """The state of a worker, in words."""
    kind = state["state"]
    if kind == "running":
        since = f"running for {state['time'] - state['started']:.0f} s" if "started" in state else "starting"
        quiet = f", last output {state['time'] - state['log_changed']:.0f} s ago" if "log_changed" in state else ""
        return since + quiet
    if kind == "ended":
        reason = "" if not state["reason"] else f" ({'stopped' if state['reason'] == ASKED else state['reason']})"
        return describe_code(state["code"]) + reason
    if kind == "unreachable":
        return f"cannot be reached: {printable(state['unreachable'])}"
    return {
        "lost": "its processes are gone without a word: the machine was restarted",
        "absent": "was not started here, or the machine was replaced",
    }[kind]
