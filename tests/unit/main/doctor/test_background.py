"""A check that hangs does not hold the others up."""

import threading

from lockstep.main.doctor.background import BackgroundCheck, wait_for_all
from lockstep.main.doctor.finding import Finding


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


def test_a_check_that_raises_is_a_finding():
    def check():
        raise OSError("refused")

    (found,) = BackgroundCheck("bucket", check, "").findings(60)
    assert found == Finding.to_fix("bucket", "OSError: refused")
