"""Looking at a job whose platform may be out of reach for a while: the job goes on there meanwhile."""

import time
from collections.abc import Callable

from lockstep.exits import UNREACHABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.console import Console

LIMIT_S = 600.0
"""Seconds after which a platform that cannot be reached ends the launcher, not the job."""


class Patience:
    """Asks again where a platform does not answer.

    Args:
        console: Where it is said, once for each time that the platform goes away and comes back.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since: float | None = None

    def look[Found](self, ask: Callable[[], Found]) -> Found | None:
        """What the platform says; None where it cannot be reached now.

        Args:
            ask: Asks it.

        Raises:
            LaunchError: It refused, or it has not been reached for ``LIMIT_S``.
        """
        try:
            found = ask()
        except LaunchError as error:
            if error.code != UNREACHABLE:
                raise
            if self._since is None:
                self._since = time.monotonic()
                self._console.say(f"{error}\nThe job goes on; asking again.")
            if time.monotonic() - self._since > LIMIT_S:
                raise
            return None
        if self._since is not None:
            self._console.say("it answers again")
            self._since = None
        return found
