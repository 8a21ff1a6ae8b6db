"""Slices of which some may be missing."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Sequence

from lockstep.launch.backend import LaunchError
from lockstep.launch.pod import GivenUpError, GooglePod, Machine, Wait, left_alone


class ElasticPod:
    """Slices of which some may be missing: each is asked for, lost and made again by itself.

    Args:
        least: The slices without which nothing starts.
        more_s: Seconds to wait for the other slices once the least can be used.
    """

    def __init__(self, parts: Sequence[GooglePod], least: int, hosts: int, more_s: float) -> None:
        self._parts, self._least, self._hosts, self._more_s = parts, least, hosts, more_s
        self._used: list[GooglePod] | None = None

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self._parts)

    def create_commands(self) -> list[list[str]]:
        return [command for part in self._parts for command in part.create_commands()]

    def wait_lines(self) -> list[str]:
        return [line for part in self._parts for line in part.wait_lines()]

    def delete_commands(self) -> list[list[str]]:
        return [command for part in self._parts for command in part.delete_commands()]

    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        """The commands that bring the key to the slices in use, see `GooglePod`."""
        if machines is None:
            return [command for part in self._parts for command in part.login_commands(None)]
        commands = []
        for index, part in enumerate(self._in_use()):
            commands += part.login_commands([machine for machine in machines if machine.slice_id == index])
        return commands

    def ssh_command(self, worker: int, command: str) -> list[str]:
        return self._parts[worker // self._hosts].ssh_command(worker % self._hosts, command)

    def made_here(self) -> bool:
        """Whether the launcher made any of the slices."""
        return any(part.made_here() for part in self._parts)

    def ensure(self, wait: Wait) -> None:
        """Ask for every slice that is not there, and wait for the least of them, then for the others for a while.

        What has not come by then is withdrawn; the next start asks for it again.
        """
        enough = threading.Event()
        slice_wait = dataclasses.replace(wait, given_up=lambda: enough.is_set() or wait.given_up())
        with concurrent.futures.ThreadPoolExecutor(len(self._parts)) as pool:
            try:
                requests = [pool.submit(part.ensure, slice_wait) for part in self._parts]
                self._await(requests, wait)
            finally:
                enough.set()  # Ctrl-C too: each withdraws its request
        errors = [request.exception() for request in requests]
        for error in errors:
            if error is not None and not isinstance(error, LaunchError):
                raise error
        self._used = [part for part, error in zip(self._parts, errors, strict=True) if error is None]
        count, most = len(self._used), len(self._parts)
        if count < self._least:
            failures = [error for error in errors if error is not None]
            raise next((error for error in failures if not isinstance(error, GivenUpError)), failures[0])
        if count < most:
            why = "; ".join(str(error).partition("\n")[0] for error in errors if error is not None)
            wait.say(f"going on with {count} of {most} slices, the next start asks for {most} again: {why}")

    def _await(self, requests: Sequence[concurrent.futures.Future[None]], wait: Wait) -> None:
        """Wait until all slices have come or failed, too many have failed, or enough have come and time is up."""
        begin: float | None = None
        while not all(request.done() for request in requests):
            errors = [request.exception() for request in requests if request.done()]
            usable = errors.count(None)
            if len(requests) - (len(errors) - usable) < self._least:
                return
            if usable >= self._least:
                begin = begin or time.monotonic()
                if time.monotonic() - begin >= self._more_s:
                    return
            time.sleep(min(0.2, wait.poll_s))

    def machines(self) -> list[Machine]:
        """The machines of the slices in use, which are numbered without a gap."""
        return [
            dataclasses.replace(machine, slice_id=index)
            for index, part in enumerate(self._in_use())
            for machine in part.machines()
        ]

    def lost(self) -> str | None:
        """The first slice in use that is lost, in words."""
        return next((text for part in self._in_use() if (text := part.lost()) is not None), None)

    def delete(self, wait: Wait) -> None:
        """Delete every slice that the launcher made, and name each that could not be deleted.

        Raises:
            LaunchError: Names all that failed, after the others were deleted.
        """
        errors = []
        for part in self._parts:
            try:
                if part.made_here():
                    part.delete(wait)
                else:
                    wait.say(left_alone(part.name, part.delete_commands()))
            except LaunchError as error:
                errors.append(error)
        if errors:
            raise LaunchError("\n".join(map(str, errors)), errors[0].code)

    def _in_use(self) -> list[GooglePod]:
        """The slices of the last `ensure`; in another process those that are there."""
        return [part for part in self._parts if part.lost() is None] if self._used is None else self._used
