"""The fake ssh: runs the command on a machine of the fake cloud, as a process with that machine's home directory."""

import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fake_cloud import google_cloud

WITH_VALUE = {"-o", "-i", "-p", "-l", "-F", "-J"}
"""Options of ssh that take the next word."""


def main(words: list[str]) -> int:
    cloud = google_cloud.Cloud(Path(os.environ[google_cloud.DIRECTORY]))
    with open(cloud.directory / "ssh-calls.txt", "a", encoding="utf-8") as log:  # for tests that look for secrets
        log.write(shlex.join(words) + "\n")
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        if option in WITH_VALUE:
            words.pop(0)
    (user, _, address), command = words[0].partition("@"), " ".join(words[1:])
    state = cloud.read()
    machine = next(
        (each for each in state["machines"].values() if address in (each["external"], each["internal"])), None
    )
    if machine is None or machine["name"] in state["unreachable"]:
        print(f"ssh: connect to host {address} port 22: Connection timed out", file=sys.stderr)
        return 255
    environment = {
        "HOME": machine["home"],
        "USER": user,
        "PATH": os.environ["PATH"],
        google_cloud.MACHINE: machine["home"],
        "FAKE_WORKER_NUMBER": str(machine["worker"]),
        "FAKE_WORKER": str(machine["worker"] + machine["slice"] * int(os.environ.get("FAKE_HOSTS_PER_SLICE", "0"))),
    }
    if "LD_LIBRARY_PATH" in os.environ:  # without which this Python may not start
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    dropped_before = state["drops"].get(machine["name"], 0)
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env=environment,
        cwd=machine["home"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    copies = [
        threading.Thread(target=copy, args=(process.stdout, 1), daemon=True),
        threading.Thread(target=copy, args=(process.stderr, 2), daemon=True),
    ]
    for thread in copies:
        thread.start()
    looked = 0.0
    while any(thread.is_alive() for thread in copies):
        copies[0].join(0.05)
        if copies[0].is_alive() is False:
            copies[1].join(0.05)
        if time.monotonic() - looked > 0.3:
            looked = time.monotonic()
            now = cloud.read()
            gone = machine["name"] not in now["machines"] or machine["name"] in now["unreachable"]
            if gone or now["drops"].get(machine["name"], 0) > dropped_before:
                print(f"Connection to {address} closed by remote host.", file=sys.stderr, flush=True)
                os._exit(255)
    code = process.wait()
    return code if code >= 0 else 128 - code


def copy(stream, to: int) -> None:
    while data := os.read(stream.fileno(), 1 << 16):
        os.write(to, data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
