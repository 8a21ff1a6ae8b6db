"""Operations on a job that was started before: its status, its logs, its end."""

import dataclasses
import queue
import time
from typing import Any

from lockstep.errors import LockstepError
from lockstep.exits import DONE, INTERRUPTED, UNREACHABLE, WORKER_LOST, describe_code
from lockstep.launch.attempt import ASKED, Ending, first_failure
from lockstep.launch.backend import Console, LaunchError, Transport, WorkerBackend, root_on_worker
from lockstep.launch.connection import WAITING_EVENTS, Connection, DroppedError, Event, Follower, answered, call
from lockstep.launch.prepare import on_all
from lockstep.launch.record import Attempt, JobRecord
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
        return next((each for each in reversed(self._job.attempts) if each.launched), self._job.attempts[-1])

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
        endings = [
            Ending(worker=index, code=state["code"], at=state["ended"], reason=state["reason"])
            if state["state"] == "ended"
            else Ending(worker=index, code=WORKER_LOST, at=time.time(), reason="its processes are gone")
            for index, state in enumerate(states)
        ]
        cause = first_failure(endings, unreachable=False, all_ended=True, waited_s=0.0)
        text = f"worker {transport.workers[cause.worker].name} failed first. {cause.reason}".strip() if cause else ""
        ended = max(each.at for each in endings)
        self._job = self._job.with_attempt(
            dataclasses.replace(attempt, ended=ended, code=cause.code if cause else DONE, cause=text)
        )
        self._job.save()

    def logs(self, *, follow: bool) -> int:
        """Print what is kept here and what is new on the workers; with ``follow`` until the command has ended."""
        attempt = self._last()
        if self._job.deleted or (attempt.code is not None and not follow):
            return self._print_kept(attempt)
        try:
            transport = self._backend.find(self._options)
        except LockstepError:
            self._print_kept(attempt)
            raise
        try:
            return self._follow(transport, attempt, wait=follow)
        except KeyboardInterrupt:
            self._console.say(f"no longer followed; job {self._job.name} goes on")
            return INTERRUPTED

    def _print_kept(self, attempt: Attempt) -> int:
        paths = sorted(
            self._job.log(attempt.number, 0).parent.glob("worker-*.log"), key=lambda path: int(path.stem.split("-")[1])
        )
        for path in paths:
            for line in path.read_bytes().splitlines():
                self._console.line(f"[{path.stem.split('-')[1]}] ", line)
        return DONE

    def _follow(self, transport: Transport, attempt: Attempt, wait: bool) -> int:
        """Print the logs of all workers, and add to the files here what was not in them."""
        count = len(transport.workers)
        self._print_kept(attempt)
        paths = [self._job.log(attempt.number, index) for index in range(count)]
        paths[0].parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        offsets = [path.stat().st_size if path.exists() else 0 for path in paths]
        requests = [{"root": root_on_worker(self._job.name, index), "attempt": attempt.id} for index in range(count)]
        if not wait:
            for index in range(count):
                self._fetch(transport, index, requests[index], offsets[index])
            return DONE
        events: queue.Queue[Event] = queue.Queue(WAITING_EVENTS)
        followers = [
            Follower(transport, index, requests[index], None, offsets[index], events) for index in range(count)
        ]
        rest = [b""] * count
        states: dict[int, dict[str, Any]] = {}
        try:
            for follower in followers:
                follower.start()
            while len(states) < count:
                for follower in followers:
                    follower.tick()
                try:
                    event = events.get(timeout=0.1)
                except queue.Empty:
                    continue
                index = event.worker
                if event.kind == "output":
                    rest[index] = self._print_new(index, paths[index].name, event.data, rest[index])
                elif event.kind == "dropped":
                    self._console.once(f"worker {transport.workers[index].name} cannot be reached: {event.text}")
                elif event.kind == "result":
                    states[index] = {"state": "lost", **event.result}
        finally:
            for follower in followers:
                follower.finish()
            for follower in followers:
                if follower.is_alive():
                    follower.join(timeout=5)
        self._note_end(transport, [states[index] for index in range(count)])
        return self._last().code or DONE

    def _fetch(self, transport: Transport, index: int, request: dict[str, Any], offset: int) -> None:
        full = {**request, "op": "follow", "start": None, "offset": offset, "wait": False}
        connection, rest = Connection(transport, index, full, stays=True), b""
        try:
            for kind, data in connection.frames():
                if kind == "O":
                    rest = self._print_new(index, f"worker-{index}.log", data, rest)
                elif kind == "R" and (error := answered(data, "follow").get("error")):
                    self._console.say(f"worker {transport.workers[index].name}: {error}")
        except DroppedError as error:
            self._console.say(f"worker {transport.workers[index].name} cannot be reached: {error}")
        finally:
            connection.close()
        if rest:
            self._console.line(f"[{index}] ", rest)

    def _print_new(self, index: int, name: str, data: bytes, rest: bytes) -> bytes:
        with (self._job.log(self._last().number, index).with_name(name)).open("ab") as file:
            file.write(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            self._console.line(f"[{index}] ", line)
        return rest

    def stop(self) -> int:
        """End the command on all workers, and say how it ended."""
        grace = float(self._options.grace_s)
        transport = self._backend.find(self._options)
        attempt = self._last()
        self._console.say(f"stopping {self._job.name}; its processes have {grace:g} s to save")
        answers = on_all(
            transport, lambda index: self._call(transport, index, op="clear", how="stop", timeout_s=grace + MARGIN_S)
        )
        states = on_all(transport, lambda index: self._call(transport, index, op="status", attempt=attempt.id))
        for index, (worker, state) in enumerate(zip(transport.workers, states, strict=True)):
            print(f"[{index}] {worker.name}: {_in_words(state)}")
        self._note_end(transport, states)
        return UNREACHABLE if any("unreachable" in answer for answer in answers) else DONE

    def delete(self) -> int:
        """Stop the job, remove its files from the workers, and give back the workers; its logs here stay."""
        left = False  # whether the command may still run
        try:
            transport = self._backend.find(self._options)
        except LaunchError as error:  # workers that are gone need no stop
            self._console.say(f"its workers cannot be found: {error}")
        else:
            failures = [each for each in on_all(transport, lambda index: self._delete_on(transport, index)) if each]
            for failure in failures:
                self._console.say(failure)
            left = bool(failures)
        self._backend.release(self._options, self._console)
        if left and self._has_workers():
            self._console.say(
                f"{self._job.name} is not deleted: its command may still run there. Delete it again once every worker "
                "can be reached."
            )
            return UNREACHABLE
        dataclasses.replace(self._job, deleted=True).save()
        self._console.say(f"deleted {self._job.name}; its logs stay in {self._job.directory}")
        return DONE

    def _delete_on(self, transport: Transport, index: int) -> str:
        """Stop the job on a worker and remove its files there; the reason why that cannot be done, or ""."""
        limit_s = float(self._options.grace_s) + MARGIN_S
        try:
            answer = self._call(transport, index, op="delete", timeout_s=limit_s)
        except LaunchError as error:
            return str(error)
        away = answer.get("unreachable")
        return f"worker {transport.workers[index].name} cannot be reached: {away}" if away else ""

    def _has_workers(self) -> bool:
        """Whether there are workers, as far as the backend can say."""
        try:
            self._backend.find(self._options)
        except LaunchError as error:
            return error.code == UNREACHABLE
        return True


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
