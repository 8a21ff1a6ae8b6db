"""Findings of several processes become one report that names who has what."""

import threading

from lockstep.main.doctor.finding import BackgroundCheck, Finding, attempt, merge, wait_for_all


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
