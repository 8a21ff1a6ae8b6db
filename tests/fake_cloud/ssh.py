#!/usr/bin/env python3
"""A fake ``ssh``: runs the command in a shell on this machine, in a home directory of the host's own.

``FAKE_CLOUD`` is a directory. A host is reachable when it has a folder ``hosts/NAME``, which is its home directory.
Files beside it change what happens:

- ``hosts/NAME.down``: the host cannot be reached; open connections drop, what runs on it goes on.
- ``hosts/NAME.drop``: the number of bytes after which an answer is cut off; removed when that has happened.
- ``hosts/NAME.bare``: the host has no Python.
- ``hosts/NAME.gone``: as down, and everything that runs on it is killed: the host was preempted.

Every call is a line of ``calls.jsonl``. What a command line or an environment had is there for tests to search.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

WITH_ARGUMENT = set("BbcDEeFIiJLlmOopQRSWw")


def parse(words):
    """Host and command of an ssh command line."""
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if len(word) == 2 and word[1] in WITH_ARGUMENT:
            words.pop(0)
    return words[0].rpartition("@")[2], " ".join(words[1:])


def run(host: str, command: str, refused: str = "ssh: connect to host {host} port 22: Connection refused") -> int:
    """Run a command on a host as a remote shell does; 255 where the connection fails."""
    cloud = Path(os.environ["FAKE_CLOUD"])
    home = cloud / "hosts" / host
    down, gone, drop = (home.with_name(f"{host}.{kind}") for kind in ("down", "gone", "drop"))
    with (cloud / "calls.jsonl").open("a") as log:
        log.write(json.dumps({"time": time.time(), "argv": sys.argv, "host": host}) + "\n")
    if gone.exists():
        kill_everything(host)
    if not home.is_dir() or down.exists() or gone.exists():
        print(refused.format(host=host), file=sys.stderr)
        return 255
    keep = ("PATH", "LANG", "TMPDIR", "FAKE_CLOUD", "COVERAGE_PROCESS_START", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    if home.with_name(f"{host}.bare").exists():
        environment["PATH"] = str(cloud)
    environment |= {"HOME": str(home), "FAKE_HOST": host, "USER": "me"}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=home, env=environment, stdin=0, stdout=subprocess.PIPE, start_new_session=True
    )

    def watch():
        while True:
            if gone.exists():
                kill_everything(host)
            if down.exists() or gone.exists():
                dropped()
            time.sleep(0.02)

    def dropped():
        """The connection is gone: the remote shell and its children get a hang-up."""
        print(f"Connection to {host} closed by remote host.", file=sys.stderr, flush=True)
        try:
            os.killpg(process.pid, signal.SIGHUP)
        finally:
            os._exit(255)

    threading.Thread(target=watch, daemon=True).start()
    left = int(drop.read_text()) if drop.exists() else None
    assert process.stdout is not None
    while data := os.read(process.stdout.fileno(), 1 << 16):
        if left is not None and len(data) >= left:
            os.write(1, data[:left])
            drop.unlink(missing_ok=True)
            dropped()
        left = None if left is None else left - len(data)
        os.write(1, data)
    code = process.wait()
    if gone.exists():
        kill_everything(host)
        return 255
    return code if code >= 0 else 128 - code


def kill_everything(host: str) -> None:
    """Kill what runs on a host of this cloud, however it was started: its variables say where it runs."""
    marks = {f"FAKE_HOST={host}".encode(), f"FAKE_CLOUD={os.environ['FAKE_CLOUD']}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marks <= set(path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            pass


if __name__ == "__main__":
    sys.exit(run(*parse(sys.argv[1:])))
