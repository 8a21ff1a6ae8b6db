import json

from lockstep.check.log import LogReader

STACK = {"is": "stack", "id": 0, "frames": [["train.py", 3, "main"]]}
PROGRAM = {"is": "program", "id": 0, "name": "step", "digest": "d", "processes": [0, 1], "devices": 4, "local": [0, 1]}
PROGRAM |= {"operation": False, "arguments": ["float32[8]"], "donated": [0], "text": "module"}
LAUNCH = {"is": "launch", "program": 0, "stack": 0, "thread": ""}


class Written:
    """A file that a process writes, and who reads it."""

    def __init__(self, directory):
        self.file = directory / "process-1.jsonl"
        self.reader = LogReader(self.file, 1, {})
        self.log = self.reader.log

    def read(self, *lines, rest=b""):
        with self.file.open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + rest)
        return self.reader.read()


def test_a_launch_has_its_program_and_its_line(tmp_path):
    written = Written(tmp_path)
    (launch,) = written.read(STACK, PROGRAM, {**LAUNCH, "live": 5, "values": [[1, "aa", "0.1"]]}, {"is": "end"})
    assert launch.program.key == ("step", "d", (0, 1)) and launch.program.shared
    assert launch.stack[0].place == "train.py:3" and launch.live == 5 and launch.values == ((1, "aa", "0.1"),)
    log = written.log
    assert log.ended and log.error is None and log.index == 1 and log.launches == 1


def test_what_is_written_later_is_read_later_and_half_a_line_when_it_is_whole(tmp_path):
    written = Written(tmp_path)
    line = json.dumps(LAUNCH).encode() + b"\n"
    assert len(written.read(STACK, PROGRAM, LAUNCH, rest=line[:7])) == 1
    assert written.reader.read() == []
    assert len(written.read(rest=line[7:])) == 1
    assert written.log.launches == 2


def test_a_launch_that_is_made_again_takes_no_more_memory(tmp_path):
    first, second = Written(tmp_path).read(STACK, PROGRAM, LAUNCH, LAUNCH)
    assert first is second


def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.check.log.CHUNK", 64)
    written = Written(tmp_path)
    found = written.read(STACK, PROGRAM, *[LAUNCH] * 10)
    assert 0 < len(found) < 10
    while more := written.reader.read():
        found += more
    assert len(found) == 10


def test_no_file_is_no_launch(tmp_path):
    assert LogReader(tmp_path / "process-0.jsonl", 0, {}).read() == []


def test_where_a_process_is_counts_since_its_last_launch(tmp_path):
    where = {"is": "where", "thread": "MainThread", "stack": 0, "compiling": False, "waiting": False}
    written = Written(tmp_path)
    written.read(STACK, PROGRAM, LAUNCH, where)
    assert set(written.log.where) == {"MainThread"}
    written.read(LAUNCH)
    assert written.log.where == {}


def test_the_thread_that_trains_is_the_main_one_if_that_trains_at_all(tmp_path):
    written = Written(tmp_path)
    written.read(STACK, PROGRAM, {**LAUNCH, "thread": "trainer"})
    assert written.log.home == "trainer"
    written.read(LAUNCH)
    assert written.log.home == ""
