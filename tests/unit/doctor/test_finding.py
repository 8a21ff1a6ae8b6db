"""Findings of several processes become one report that names who has what."""

import io
import json
import threading

import pytest
from rich.console import Console

from lockstep.doctor.finding import BackgroundCheck, Finding, Findings, attempt, merge, wait_for_all
from lockstep.errors import ConfigError


def test_what_all_have_is_one_line_without_names():
    (one,) = merge([[Finding.ok("disk", "10 GiB free")]] * 3)
    assert one.where == "" and one.finding.text == "10 GiB free"


def test_what_is_ok_with_other_numbers_is_one_line_that_says_so():
    (one,) = merge([[Finding.ok("disk", f"{size} GiB free")] for size in (10, 11, 12)])
    assert one.finding.text == "10 GiB free (process 0; 2 more are ok too)" and one.where == ""


def test_a_failure_of_some_names_them_and_stays_beside_the_others():
    full = Finding.to_fix("disk", "1 MiB free", "Delete something.")
    good, other = Finding.ok("disk", "10 GiB free"), Finding.ok("devices", "4")
    merged = merge([[good, other], [full, other], [full, other], [full, other]])
    assert [(each.finding.name, each.finding.outcome, each.where) for each in merged] == [
        ("disk", "ok", "process 0"),
        ("disk", "fix", "processes 1-3"),
        ("devices", "ok", ""),
    ]
    assert merged[1].as_json()["processes"] == [1, 2, 3]


def test_two_of_one_name_on_a_process_stay_two():
    disks = [Finding.ok("disk", "10 GiB free in /"), Finding.ok("disk", "20 GiB free in /tmp")]
    assert [each.finding for each in merge([disks, disks])] == disks


def test_a_check_that_raises_is_a_finding():
    def check():
        raise KeyError("no such\nthing")

    (found,) = attempt("mesh", check)
    assert found == Finding.to_fix("mesh", "KeyError: 'no such\\nthing'")
    assert attempt("mesh", lambda: [found, found]) == [found, found]


def test_a_check_that_hangs_is_a_finding_and_the_others_are_whole():
    released = threading.Event()
    checks = [
        BackgroundCheck("slow", lambda: Finding.ok("slow", str(released.wait(120))), "Look at the network."),
        BackgroundCheck("quick", lambda: Finding.ok("quick", "done"), ""),
        BackgroundCheck("slow too", lambda: Finding.ok("slow too", str(released.wait(120))), "Look at the network."),
    ]
    found = wait_for_all(checks, 0.3)
    released.set()
    assert [(each.name, each.outcome) for each in found] == [("slow", "fix"), ("quick", "ok"), ("slow too", "fix")]
    assert found[0].text == "no answer within 0.3 s." and found[0].fix == "Look at the network."


def test_a_check_that_raises_in_its_thread_is_a_finding():
    def check():
        raise OSError("refused")

    (found,) = BackgroundCheck("bucket", check, "").findings(60)
    assert found == Finding.to_fix("bucket", "OSError: refused")


FULL = Finding.to_fix("disk", "1 MiB [of] 2 free", "Delete something.")
GOOD = Finding.ok("devices", "4 of cpu")


def test_a_log_has_a_line_for_each_finding(tmp_path):
    out = io.StringIO()
    report = Findings(Console(file=out, width=40), tmp_path / "new" / "report.json")
    report.begin()
    report.add("machine", merge([[FULL], []]), {"speed": 3})
    kept = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (kept["complete"], kept["exit_code"], kept["speed"]) == (False, 1, 3)
    report.add("job", merge([[GOOD]]))
    report.add("reach", [])
    assert report.finish() == 1
    first, second, last = out.getvalue().splitlines()
    assert first == "fix      disk (process 0): 1 MiB [of] 2 free Fix: Delete something."
    assert second == "ok       devices: 4 of cpu"
    assert last.startswith("1 ok, 0 warnings, 1 to fix, ") and last.endswith("report.json")
    kept = json.loads((tmp_path / "new" / "report.json").read_text())
    assert kept["complete"] and kept["sections"]["machine"][0]["fix"] == "Delete something."
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_a_terminal_gets_a_table():
    out = io.StringIO()
    report = Findings(Console(file=out, width=60, force_terminal=True, color_system=None))
    report.add("machine", merge([[FULL], []]))
    text = out.getvalue()
    assert "machine" in text and "[of]" in text and "process 0" in text and "Delete something." in text


def test_without_a_fix_the_exit_code_is_0_and_nothing_is_shown_without_a_console():
    report = Findings()
    report.add("job", merge([[GOOD, Finding.warning("mesh", "large")]]))
    assert report.finish() == 0


def test_a_file_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"json is .*file/report\.json, which cannot be written: .* Choose another"):
        Findings(None, tmp_path / "file" / "report.json").begin()
