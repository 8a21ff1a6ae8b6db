"""The machine of a user in front of a fake Google Cloud: its home directory, and launchers that are started on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.agent.main import is_busy
from tests.fake_cloud.google_cloud import Cloud, end_machine

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PORT = 8476
LAUNCHER = [sys.executable, str(ROOT / "infra" / "launch.py")]


class Laptop:
    """The machine of the user: its home directory, and commands that it has run."""

    def __init__(self, directory: Path) -> None:
        if is_busy(DEFAULT_PORT):  # the fake machines are processes of this one
            pytest.skip(f"port {DEFAULT_PORT} of this machine is in use, where jobs of TPU VMs begin")
        self.directory = directory
        self.cloud = Cloud(directory / "cloud")
        self.cloud.install(directory / "bin")
        (directory / "home").mkdir()
        self.environment = {
            **os.environ,
            "FAKE_GOOGLE": str(self.cloud.directory),
            "HOME": str(directory / "home"),
            "LOCKSTEP_JOBS_DIR": str(directory / "jobs"),
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": "",
        }
        self.environment.pop("XDG_CACHE_HOME", None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*LAUNCHER, *words], env=self.environment, cwd=self.directory, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def launch(self, *words: str, code: int = 0, timeout_s: float = 300.0) -> str:
        process = self.start(*words)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
            raise AssertionError(f"it did not end\n{output}") from None
        assert process.returncode == code, output
        return output

    def read_until(self, process: subprocess.Popen[str], text: str, times: int = 1) -> str:
        """The output of a launcher up to the line in which a text stands for the last of so many times."""
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if output.count(text) >= times:
                return output
        raise AssertionError(f"it ended without {text!r}:\n{output}")

    def paste(self, script: str) -> str:
        """What the shell prints for a script."""
        script = script.replace("sleep 10", "sleep 0.1")
        done = subprocess.run(
            ["sh", "-eu"], input=script, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def add_metadata_server(self) -> None:
        """Let machines ask for their number, by a ``curl`` that knows it."""
        curl = self.directory / "bin" / "curl"
        curl.write_text(
            '#!/bin/sh\ncase "$*" in *agent-worker-number) printf %s "$FAKE_WORKER_NUMBER" ;; *) exit 22 ;; esac\n'
        )
        curl.chmod(0o755)

    def close(self) -> None:
        """End what still runs on the machines."""
        for name in list(self.cloud.read()["machines"]):
            with self.cloud.change() as state:
                end_machine(state, name)
