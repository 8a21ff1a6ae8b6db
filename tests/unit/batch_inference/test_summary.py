"""What is said of a finished job."""

import dataclasses
import json

import pytest

from lockstep.batch_inference.summary import (
    MemoryLog,
    Outcome,
    Totals,
    add_up,
    closing_words,
    first_rows,
    metrics,
    summary_table,
)
from lockstep.engine.schedule import DraftCounts
from lockstep.health import State
from lockstep.report.metrics import SCALARS
from tests.multiprocess.harness import run_threads
from tests.unit.batch_inference.made_up_progress import shown
from tests.unit.batch_inference.made_up_rows import row

OUTCOME = Outcome(
    totals=Totals(rows=20, tokens=190, finish={"stop": 20}, sums={"gsm8k": 5.0}, counts={"gsm8k": 20}),
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


def test_figures_have_the_promised_names():
    outcome, totals = OUTCOME, OUTCOME.totals
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
    assert "drafts" not in text and not any("drafts" in name for name in values)
    own = {name.removeprefix("sample/") for name in values} - set(totals.sums)
    assert {name for name in own if "/" not in name} <= SCALARS, "no metric may have the name of one of them"

    saved = DraftCounts(tokens=160, steps=40, drafted=100, right=90)
    outcome = dataclasses.replace(outcome, drafts=saved)
    assert metrics(outcome) == values | {
        "sample/drafts/accepted_share": 0.9,
        "sample/drafts/steps_saved": 120,
        "sample/drafts/tokens_per_step": 4.0,
    }
    assert "90% right, 120 of 160 steps saved" in shown(summary_table(outcome))


def test_the_share_of_each_state_is_of_the_rows_whose_health_is_known():
    healths = [{}, *({"health": states, "loop_from": None} for states in ("", "loop cut", "cut"))]
    totals = Totals().add(json.dumps({**row(place), **health}).encode() for place, health in enumerate(healths))
    assert (totals.looked_at, totals.states) == (3, {"loop": 1, "cut": 2})
    both = run_threads(lambda hosts: add_up(hosts, totals), 2)[0]
    assert both.health == {state: {"loop": 1, "cut": 2}.get(state, 0) / 3 for state in State if state != "same_answer"}
    outcome = dataclasses.replace(OUTCOME, totals=both)
    assert metrics(outcome)["sample/health/cut"] == pytest.approx(2 / 3)
    assert "loop 2 (33.3%), cut 4 (66.7%)" in shown(summary_table(outcome))
    assert not any("health" in name for name in metrics(OUTCOME))
    assert "health" not in shown(summary_table(OUTCOME))


def test_a_mean_is_over_the_rows_that_have_a_value():
    lines = [
        json.dumps(each).encode()
        for each in (row(3), {**row(5), "gsm8k": 1.0}, {**row(7), "gsm8k": 0.5}, {**row(9), "gsm8k": None})
    ]
    totals = Totals().add(lines)
    assert (totals.rows, totals.tokens, totals.finish) == (4, 24, {"stop": 4})
    assert totals.means == {"length": 6.0, "gsm8k": 0.75}


def test_sums_of_all_hosts_are_the_leaders():
    parts = [
        Totals(rows=1, tokens=5, finish={"stop": 1}, sums={"a": 1.0}, counts={"a": 1}),
        Totals(rows=2, tokens=7, finish={"length": 1, "stop": 1}, sums={"a": 4.0, "b": 2.0}, counts={"a": 2, "b": 1}),
    ]
    every, nothing = run_threads(lambda hosts: add_up(hosts, parts[hosts.index]), 2)
    assert nothing is None and (every.rows, every.tokens, every.finish) == (3, 12, {"stop": 2, "length": 1})
    assert every.means == {"a": pytest.approx(5 / 3), "b": 2.0}


def test_memory_is_that_of_the_host_with_most_in_use(monkeypatch):
    def body(hosts):
        log = MemoryLog(hosts)
        log._add("loaded", 5 + hosts.index)
        log._add("peak", None if hosts.index else 9)
        return log.of_all("memory")

    assert run_threads(body, 2) == [{"loaded": 6, "peak": 9}, {}]


def test_the_table_has_the_first_rows_of_the_merged_file(tmp_path):
    merged = tmp_path / "samples.jsonl"
    merged.write_text("".join(json.dumps(row(number)) + "\n" for number in range(4)))
    assert [each.num_tokens for each in first_rows(merged, 3)] == [0, 1, 2]


def test_only_files_that_exist_are_listed_at_the_end(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    text = closing_words([("rows", tmp_path / "samples.jsonl"), ("table", tmp_path / "none")], "gs://bucket/rows")
    assert text == f"\ndone:\n  rows       {tmp_path}/samples.jsonl\n  uploaded   gs://bucket/rows"
