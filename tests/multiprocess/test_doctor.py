"""lockstep doctor on two processes: a host that differs is named, and the self-test passes."""

import json
import sys
import time
from pathlib import Path

import pytest

from lockstep.placement.device import calibrated, chip_named
from tests.multiprocess.harness import run_command
from tests.snippets import commands_before, lacking

DOCTOR = "import os, sys; from lockstep.main.cli import main; sys.argv[0] = 'lockstep'; {before}main()"


def doctor(*arguments, before="", **options):
    """The report of doctor on two processes, started with some Python of its own."""
    return run_command([sys.executable, "-c", DOCTOR.format(before=before), "doctor", *arguments], **options)


@pytest.mark.slow
def test_a_host_with_another_flag_is_named_and_all_end_with_1(tmp_path):
    other = "os.environ['LIBTPU_INIT_ARGS'] = '--xla_tpu_x=' + os.environ['LOCKSTEP_PROCESS_ID']; "
    run = doctor("--json", str(tmp_path / "report.json"), "--measure", "false", before=other)
    assert run.code == 1
    assert lacking("docs/doctor.md:text:1", run.logs[0]) is None, run.logs[0]
    assert "ok   " not in run.logs[1], "the leader alone reports"
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["complete"] and kept["exit_code"] == 1 and len(kept["facts"]) == 2
    assert len(kept["coordination"]) == 2 and all(one["barrier_s"] > 0 for one in kept["coordination"])


@pytest.mark.nightly  # in make slow: the tests around it
def test_the_example_of_the_page_is_printed(tmp_path):
    name = "docs/doctor.md:text:0"
    (line,) = commands_before(name)
    launch, _, command = line.partition(" -- ")
    assert launch == "lockstep launch --processes 2 --devices_per_process 2"
    assert command == "lockstep doctor"
    run = doctor()
    assert lacking(name, run.logs[0]) is None, run.logs[0]


@pytest.mark.nightly  # in make slow: the tests around it
def test_the_network_between_slices_is_measured(tmp_path):
    """Two processes that are told they are two slices, over the loopback device."""
    path, report = tmp_path / "cpu.json", tmp_path / "report.json"
    told = "os.environ['MEGASCALE_NUM_SLICES'] = '2'; "
    run = doctor("--calibrate", str(path), "--json", str(report), before=told)
    assert run.code == 0, run.output
    assert "in 2 slices" in run.logs[0] and "dcn 2, dp 1, fsdp 2, tp 1" in run.logs[0]
    assert "all-reduce over dcn: 2 devices of several slices: 4 KiB " in run.logs[0]
    assert " GB/s per host" in run.logs[0] and "has bandwidth, flops, dcn, link (" in run.logs[0]
    measured = [one for one in json.loads(report.read_text())["collectives"] if one["group"] == "dcn"]
    assert {one["kind"] for one in measured} == {"all-reduce", "all-gather"} and all(
        one["seconds"] > 0 for one in measured
    )
    assert calibrated(chip_named("cpu", "cpu"), str(path)).dcn == json.loads(path.read_text())["dcn"] > 1e5


@pytest.mark.nightly
def test_the_self_test_passes_in_every_layout(tmp_path):
    report, path = tmp_path / "report.json", tmp_path / "cpu.json"
    begin = time.monotonic()
    run = doctor("--self-test", "--json", str(report), "--calibrate", str(path), timeout_s=400)
    assert run.code == 0, run.output
    assert time.monotonic() - begin < 300
    kept = json.loads(Path(report).read_text(encoding="utf-8"))
    assert kept["complete"]
    tests = {title: found for title, found in kept["sections"].items() if title.startswith("self-test ")}
    assert list(tests) == ["self-test auto", "self-test host_local"]
    for found in tests.values():
        assert {each["outcome"] for each in found} == {"ok"}
        assert all(each["processes"] == [0, 1] for each in found)
    layouts = [each["name"].partition(": layout ")[2] for each in tests["self-test auto"]]
    assert [layout for layout in layouts if layout] == ["auto", "training", "{tensor: 1}", "{tensor: 2}", "{tensor: 4}"]
    chip = calibrated(chip_named("cpu", "cpu"), str(path))
    assert min(chip.bandwidth, chip.link.bandwidth, chip.network.bandwidth) > 1e6
    assert kept["collectives"] and chip.source.startswith("measured 20")
