"""The launch lines in the heads of the shipped configurations, read by the launcher's own parser."""

import re
import shlex
from pathlib import Path

import pytest

from lockstep.launch import parse
from lockstep.launch.tpu_vm_backend import TpuVmBackend
from lockstep.main.commands import find_command

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "config").rglob("*.yaml"))


def launch_lines(path):
    """The command lines in the comment at a file's beginning, as words after ``infra/launch.py``."""
    head = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))[0]
    text = "\n".join(line.removeprefix("#").strip() for line in head.splitlines()).replace("\\\n", " ")
    found = re.findall(r"^.*infra/launch\.py (.*)$", text, re.MULTILINE)
    return [shlex.split(line.partition(", also")[0]) for line in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_head_says_how_it_is_launched(path):
    lines = launch_lines(path)
    assert lines
    for words in lines:
        options = parse(words)
        program, command, *arguments = options.command
        assert program == "lockstep"
        find_command(command)
        given = Path(arguments[arguments.index("--config_path") + 1])
        assert ROOT / given == path
        if options.backend == "local":
            continue
        TpuVmBackend().plan(options)
        kind = options.tpu_type.replace("-", "_")
        assert kind in path.stem or kind.replace("_", "") in path.stem or f"a {options.tpu_type} (" in path.read_text()
        # What the run reads on a worker is copied there.
        needed = [str(given), *re.findall(r"^\w+: (data/\S+)", path.read_text(), re.MULTILINE)]
        assert all(any(Path(name).is_relative_to(each) for each in options.sync) for name in needed)
