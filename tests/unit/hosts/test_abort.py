"""What a process says, and how it ends, where a library aborts it."""

import subprocess
import sys

import pytest

SCRIPT = """
import faulthandler, os, sys, threading
from lockstep.hosts.abort import on_abort

faulthandler.enable()
def last_word():
    print("a last word", flush=True)
    return sys.argv[1] == "peer"

restore = on_abort(last_word)
if sys.argv[1] == "restored":
    restore()
thread = threading.Thread(target=os.abort)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("why", "code", "said", "stacks"),
    [("peer", 85, True, False), ("own", -6, True, True), ("restored", -6, False, True)],
)
def test_an_abort_because_of_a_peer_has_a_last_word_and_its_code(why, code, said, stacks) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, why], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("a last word" in done.stdout) == said
    assert ("Fatal Python error: Aborted" in done.stderr) == stacks, "the handler of before"
