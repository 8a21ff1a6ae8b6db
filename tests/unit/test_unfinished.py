import time

import pytest

from lockstep import unfinished
from lockstep.unfinished import before_end, finish_work


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    monkeypatch.setattr(unfinished, "_registered", [])


def test_all_work_has_one_time_together_and_what_is_not_done_is_told():
    seen = []

    @before_end
    def slow(timeout_s):
        seen.append(timeout_s)
        time.sleep(timeout_s)
        return ["step 2 is lost"]

    @before_end
    def late(timeout_s):
        seen.append(timeout_s)
        return ["step 4 is lost"]

    assert finish_work(0.1) == ["step 2 is lost", "step 4 is lost"] and seen[1] == 0
    assert seen[0] == pytest.approx(0.1, abs=0.05)


def test_what_raises_holds_up_nobody():
    before_end(lambda timeout_s: 1 / 0)
    before_end(lambda timeout_s: [])
    assert finish_work(1) == []
