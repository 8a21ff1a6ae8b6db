import json

from lockstep.check.log import read_log

STACK = {"is": "stack", "id": 0, "frames": [["train.py", 3, "main"]]}
PROGRAM = {"is": "program", "id": 0, "name": "step", "digest": "d", "processes": [0, 1], "devices": 4, "local": [0, 1]}
PROGRAM |= {"operation": False, "arguments": ["float32[8]"], "donated": [0], "text": "module"}
LAUNCH = {"is": "launch", "program": 0, "stack": 0, "thread": ""}


def log_of(tmp_path, *lines, rest=b""):
    file = tmp_path / "process-1.jsonl"
    file.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + rest)
    return read_log(file, 1)


def test_a_launch_has_its_program_and_its_line(tmp_path):
    log = log_of(tmp_path, STACK, PROGRAM, {**LAUNCH, "live": 5, "values": [[1, "aa", "0.1"]]}, {"is": "end"})
    (launch,) = log.launches
    assert launch.program.key == ("step", "d", (0, 1)) and launch.program.shared
    assert launch.stack[0].place == "train.py:3" and launch.live == 5 and launch.values == ((1, "aa", "0.1"),)
    assert log.ended and log.error is None and log.index == 1


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path):
    assert len(log_of(tmp_path, STACK, PROGRAM, LAUNCH, rest=b'{"is": "lau').launches) == 1


def test_no_file_is_no_launch(tmp_path):
    assert read_log(tmp_path / "process-0.jsonl", 0).launches == []


def test_only_what_no_execution_refused_was_no_launch(tmp_path):
    refused = {"is": "refused", "thread": "", "text": "RuntimeError: the no_execution config option is set"}
    background = {**LAUNCH, "thread": "loader"}
    log = log_of(tmp_path, STACK, PROGRAM, LAUNCH, LAUNCH, background, refused)
    assert [launch.thread for launch in log.launches] == ["", "loader"]
    refused["text"] = "XlaRuntimeError: Gloo all-reduce failed"
    assert len(log_of(tmp_path, STACK, PROGRAM, LAUNCH, LAUNCH, refused).launches) == 2


def test_where_a_process_is_counts_since_its_last_launch(tmp_path):
    where = {"is": "where", "thread": "MainThread", "stack": 0, "compiling": False}
    assert set(log_of(tmp_path, STACK, PROGRAM, LAUNCH, where).where) == {"MainThread"}
    assert log_of(tmp_path, STACK, PROGRAM, where, LAUNCH).where == {}
