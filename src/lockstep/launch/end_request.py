"""The wish to end a job, in a file beside its record: a launcher that still works for the job finds it there.

It is no field of the record, which that launcher writes over.
"""

import secrets

from lockstep.files import write_file
from lockstep.launch.record import JobRecord

FILE = "end-request"


def ask_to_end(job: JobRecord, command: str) -> None:
    """Have a launcher that waits for a job, or would start it again, end it.

    Args:
        command: ``stop`` or ``delete``.
    """
    write_file(job.directory / FILE, f"{command} {secrets.token_hex(8)}\n", 0o600)


class EndRequest:
    """A stop or delete that is requested after this object was made."""

    def __init__(self, job: JobRecord) -> None:
        self._path = job.directory / FILE
        self._before = self._read()

    def command(self) -> str:
        """``stop`` or ``delete``; empty as long as nobody has asked."""
        now = self._read()
        return "" if now == self._before else now.partition(" ")[0]

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
