"""What hosts have done, from their own numbers."""

import dataclasses
from types import SimpleNamespace

import pytest

from lockstep.batch_inference.job_progress import Board, HostProgress, JobProgress, Meter
from lockstep.batch_inference.progress_output import line
from lockstep.engine.schedule.scheduler import Counts
from lockstep.errors import HostTimeoutError
from tests.multiprocess.harness import run_threads
from tests.unit.batch_inference.made_up_progress import FIRST, JOB


def test_what_is_derived_from_the_hosts_own_numbers():
    assert (JOB.rows_done, JOB.tokens, JOB.rate) == (700, 110_000, 5000.0)
    assert (JOB.prompts_done, JOB.prompts) == (340, 600), "100 prompts were there, each with two completions"
    assert JOB.over_floor == pytest.approx(5000 / 12000)
    assert JOB.eta_s == pytest.approx(25.0), "500 completions in 25 s, 500 are left"
    at_start = JobProgress(rows=5, found=0, hosts=[HostProgress()], seconds=0.1)
    assert (at_start.rate, at_start.over_floor, at_start.eta_s) == (0.0, None, None)
    assert JOB.metrics() == {
        "prompts_done": 340,
        "prompts_total": 600,
        "rows_done": 700,
        "rows_total": 1200,
        "tokens": 110_000,
        "tokens_per_second": 5000.0,
        "host_0/tokens_per_second": 3000.0,
        "host_1/tokens_per_second": 2000.0,
        "over_floor": pytest.approx(5000 / 12000),
        "pages_in_use": 900,
        "pages": 2048,
        "eta_s": pytest.approx(25.0),
    }


def test_what_drafts_saved_over_all_hosts_and_rounds():
    posted = []
    meter = Meter(SimpleNamespace(post=posted.append), lambda: 100.0)
    for _ in range(2):  # two rounds
        meter.begin()
        counts = Counts(finished=1, tokens=(60, 40), pages=7, max_pages=9, steps=40, drafted=80, right=60)
        meter(SimpleNamespace(counts=counts))
    own = meter.total(done=True)
    job = JobProgress(rows=5, found=0, hosts=[own, HostProgress(tokens=100, steps=80, drafted=40, right=30)], seconds=1)
    values = {name: value for name, value in job.metrics().items() if name.startswith("drafts/")}
    assert values == {"drafts/accepted_share": 0.75, "drafts/steps_saved": 140, "drafts/tokens_per_step": 300 / 160}
    assert "drafts 75% right, 140 of 300 steps saved" in line(job)
    assert "drafts" not in line(JOB)


def test_rounds_and_pauses_add_up():
    posted = []
    meter = Meter(SimpleNamespace(post=posted.append), lambda: 100.0)
    for tokens, finished in (((10, 20, 30), 1), ((30, 60, 40), 2)):
        meter(SimpleNamespace(counts=Counts(finished=finished, tokens=tokens, pages=7, max_pages=9)))
    meter.add_prompts(2)
    meter.pause()
    meter.begin()
    meter(SimpleNamespace(counts=Counts(finished=1, tokens=(1, 2, 3), pages=7, max_pages=9)))
    assert [(progress.rows, progress.tokens) for progress in posted] == [(1, 60), (2, 130), (3, 136)]
    end = meter.total(done=True)
    assert (end.rows, end.prompts, end.tokens, end.pages, end.done) == (3, 2, 136, 0, True)


def test_the_speeds_of_many_hosts_are_the_lowest_and_the_highest():
    hosts = [dataclasses.replace(FIRST, tokens=400 + 10 * number) for number in range(64)]
    assert "20 to 52 on each of 64 hosts" in line(dataclasses.replace(JOB, hosts=hosts))


def body_board(hosts, steps):
    seen = []
    board = Board(hosts, separate=True, rows=10, found=0, show=seen.append)
    for rows in range(steps[hosts.index]):
        board.post(HostProgress(rows=rows), now=True)
    board.post(HostProgress(rows=5, done=hosts.index == 0 or steps[1] > 0), now=True)
    board.wait_for_all(0.3)
    assert board.close().rows_done == 10
    assert not hosts.client.get_dir("lockstep/sample") or not hosts.is_leader
    return seen[-1].rows_done if hosts.is_leader else None


def test_hosts_wait_for_each_other_as_long_as_there_is_progress():
    assert run_threads(body_board, 2, [2, 3])[0] == 10
    with pytest.raises(HostTimeoutError, match=r"process 1 made no progress on its share .* for 0.3 s"):
        run_threads(body_board, 2, [1, 0])
