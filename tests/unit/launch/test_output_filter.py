"""The filter as a worker has it: two files and no package."""

import os
import signal
import subprocess
import sys

from lockstep.launch.environment import filter_files


def test_it_takes_values_out_across_pieces_and_outlives_the_signal_that_ends_the_program(tmp_path):
    for name, content in filter_files().items():
        (tmp_path / name).write_bytes(content)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "filter.py"), "TOKEN", "UNSET"],
        env={"PATH": os.environ["PATH"], "TOKEN": "hf_0123456789"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdin.write(b"first\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"first\n"
    process.send_signal(signal.SIGTERM)
    for piece in (b"it is hf_01", b"23456789\n", b"last"):
        process.stdin.write(piece)
        process.stdin.flush()
    assert process.communicate(timeout=60)[0] == b"it is <redacted>\nlast" and process.returncode == 0
