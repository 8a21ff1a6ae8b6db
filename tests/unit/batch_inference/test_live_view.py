import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from lockstep.batch_inference.job_progress import Board, HostProgress, JobProgress, Meter
from lockstep.batch_inference.live_view import LineView, line, panel
from lockstep.batch_inference.summary import Outcome, Totals, metrics, summary_table
from lockstep.errors import HostTimeoutError
from lockstep.schedule.scheduler import Counts
from tests.multiprocess.harness import run_threads

FIRST = HostProgress(rows=300, prompts=140, tokens=60_000, seconds=20.0, pages=900, max_pages=1024, floor=6000.0)
SECOND = HostProgress(rows=200, prompts=100, tokens=50_000, seconds=25.0, max_pages=1024, floor=6000.0, done=True)
JOB = JobProgress(rows=1200, found=200, generations=2, hosts=[FIRST, SECOND], seconds=25.0)


def shown(renderable):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(renderable)
    return console.export_text()


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


def test_the_panel_and_the_line_say_all_of_it():
    text = shown(panel(JOB, "sample"))
    assert "340 of 600" in text
    for part in ("700 of 1,200 (200 were there from before)", "5,000 tokens/s, 0.42 of the bandwidth floor"):
        assert part in text
    for part in ("900 of 2,048 pages in use", "0:25 so far, 0:25 left", "3,000", "2,000", "done"):
        assert part in text
    assert line(JOB) == (
        "sample: 340 of 600 prompts, 700 of 1,200 completions, 5,000 tokens/s (3,000 + 2,000), "
        "0.42 of the bandwidth floor, 900 of 2,048 pages in use, 0:25 left"
    )


def test_in_lockstep_a_host_has_the_tokens_of_its_devices():
    posted = []
    board = SimpleNamespace(post=posted.append)
    # Three replicas of two devices: the second one's devices are on two hosts.
    shares = np.asarray([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    meter = Meter(board, lambda: 100.0, lambda: shares)
    for tokens, finished in (((10, 20, 30), 1), ((30, 60, 40), 2)):
        meter(SimpleNamespace(counts=Counts(finished=finished, tokens=tokens, pages=7, max_pages=9)))
    meter.add_prompts(2)
    meter.pause()
    meter.begin()
    meter(SimpleNamespace(counts=Counts(finished=1, tokens=(1, 2, 3), pages=7, max_pages=9)))
    assert [(each.rows, each.tokens, each.by_host) for each in posted] == [
        (1, 60, [20.0, 40.0]),
        (2, 130, [60.0, 70.0]),
        (3, 136, [62.0, 74.0]),
    ]
    end = meter.total(done=True)
    assert (end.rows, end.prompts, end.tokens, end.pages, end.done) == (3, 2, 136, 0, True)

    job = dataclasses.replace(JOB, hosts=[dataclasses.replace(FIRST, by_host=[45_000.0, 15_000.0])])
    assert job.host_rates == [2250.0, 750.0] and job.rate == 3000.0
    assert job.metrics()["host_1/tokens_per_second"] == 750.0
    assert "3,000 tokens/s (2,250 + 750)" in line(job)
    assert "2,250 + 750 tokens/s on their devices" in shown(panel(job, "sample"))
    many = dataclasses.replace(JOB, hosts=[dataclasses.replace(FIRST, by_host=[400.0 + 10 * i for i in range(64)])])
    assert "20 to 52 on each of 64 hosts" in line(many)


def test_lines_come_every_few_seconds_and_at_the_end():
    printed, now = [], [0.0]
    view = LineView(printed.append, every_s=10.0, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        view.update(dataclasses.replace(JOB, found=second))
    assert len(printed) == 3
    view.close()
    view.close()
    assert len(printed) == 4
    view.update(dataclasses.replace(JOB, found=24))
    view.close()
    assert len(printed) == 4, "no line is printed twice"


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


def test_figures_have_the_promised_names():
    totals = Totals(rows=20, tokens=190, finish={"stop": 20}, sums={"gsm8k": 5.0}, counts={"gsm8k": 20})
    outcome = Outcome(
        totals=totals,
        prompts=5,
        hosts=2,
        mode="host_data_parallel",
        found=4,
        tokens=160,
        seconds=2.0,
        load_s=4.0,
        loaded_bytes=2**30,
        memory={"before_load": 2**30, "peak": 3 * 2**30},
    )
    values = metrics(outcome)
    assert {name: values[name] for name in list(values)[:5]} == {
        "sample/total_prompts": 5,
        "sample/total_generated_tokens": 190,
        "sample/num_hosts": 2,
        "sample/inference_mode": "host_data_parallel",
        "sample/tokens_per_second": 80.0,
    }
    assert values["sample/gsm8k"] == 0.25
    assert values["sample/hbm/peak_bytes"] == 3 * 2**30
    text = shown(summary_table(outcome))
    for part in (
        "20 for 5 prompts, 4 of them from before",
        "mean 0.25",
        "80 tokens/s",
        "256.00 MiB/s",
        "peak 3.00 GiB",
    ):
        assert part in text
