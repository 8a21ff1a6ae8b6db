"""A cloud of fake hosts in a directory, and launchers that are started in front of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.fake_cloud.commands import write_command

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent


class Cloud:
    """Hosts in a directory; ``ssh`` and other commands of ``tests/fake_cloud`` come first on PATH.

    Args:
        directory: An empty directory.
        commands: The fakes by the name of the command, each a script of this folder.
    """

    def __init__(self, directory, commands=("ssh",)):
        self.directory = Path(directory)
        self.hosts_directory = self.directory / "hosts"
        self.jobs = self.directory / "jobs"
        programs = self.directory / "bin"
        for folder in (self.hosts_directory, programs, self.directory / "home"):
            folder.mkdir(parents=True)
        for command in commands:
            write_command(programs / command, "-S", FAKES / f"{command}.py")
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(self.directory / "home"),
            "FAKE_CLOUD": str(self.directory),
            "LOCKSTEP_JOBS_DIR": str(self.jobs),
        }

    def add(self, *hosts):
        """Make hosts that can be reached; return their names for ``--hosts``."""
        for host in hosts:
            (self.hosts_directory / host).mkdir()
        return ",".join(hosts)

    def set(self, host, kind, text=""):
        """Make a host ``down`` or ``gone``, or let its next connection ``drop`` after so many bytes."""
        (self.hosts_directory / f"{host}.{kind}").write_text(str(text))

    def unset(self, host, kind):
        (self.hosts_directory / f"{host}.{kind}").unlink(missing_ok=True)

    def calls(self, host=None):
        """The calls so far, of one host or of all."""
        path = self.directory / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in map(json.loads, lines) if host in (None, call["host"])]

    def start(self, *words, **kwargs):
        """Start a launcher."""
        return subprocess.Popen(
            [sys.executable, str(ROOT / "infra" / "launch.py"), *words],
            env=self.environment,
            cwd=kwargs.pop("cwd", self.directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **kwargs,
        )

    def launch(self, *words, timeout=120, **kwargs):
        """Run a launcher to its end."""
        process = self.start(*words, **kwargs)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(f"the launcher did not end:\n{output}\n{errors}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def record(self, name):
        return json.loads((self.jobs / name / "job.json").read_text())

    def processes(self, host=""):
        """Numbers of the processes that run on the hosts, or on one of them."""
        mark = f"FAKE_CLOUD={self.directory}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in words and any(word.startswith(f"FAKE_HOST={host}".encode()) for word in words):
                found.append(int(path.parent.name))
        return found

    def wait_until_empty(self, seconds=60):
        """Wait until nothing runs on the hosts; return whether that is so."""
        end = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def close(self):
        """Kill what is left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def bytes_anywhere(self, needle, *more):
        """Where a text stands: in any file of the cloud and the jobs, or in further texts."""
        found = [str(path) for path in self.directory.rglob("*") if path.is_file() and needle in path.read_bytes()]
        return found + [text[:200] for text in more if needle.decode() in text]


def text_of(path):
    """The text of a file; nothing where there is none yet."""
    return path.read_text() if path.exists() else ""
