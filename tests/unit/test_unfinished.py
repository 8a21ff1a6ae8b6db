import pytest

from lockstep import unfinished
from lockstep.unfinished import before_end, finish_work
from tests.clock import Clock


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    monkeypatch.setattr(unfinished, "_registered", [])


def test_all_work_has_one_time_together_and_what_is_not_done_is_told(monkeypatch):
    seen, clock = [], Clock(1000.0)
    monkeypatch.setattr(unfinished, "time", clock)

    @before_end
    def slow(timeout_s):
        seen.append(timeout_s)
        clock.now += 1.5
        return ["step 2 is lost"]

    @before_end
    def late(timeout_s):
        seen.append(timeout_s)
        return ["step 4 is lost"]

    assert finish_work(2.0) == ["step 2 is lost", "step 4 is lost"] and seen == [2.0, 0.5]
    assert finish_work(1.0) == ["step 2 is lost", "step 4 is lost"] and seen[2:] == [1.0, 0.0]


def test_what_raises_holds_up_nobody():
    before_end(lambda timeout_s: 1 / 0)
    before_end(lambda timeout_s: [])
    assert finish_work(1) == []
