"""A benchmark's results say when, where and from what they came, without hosts' names and paths."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import levanter_round, workers
from benchmarks.run_facts import ROOT, command, run_facts
from tests.git import needs_git

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("argument", "want"),
    [
        ("/tmp/some/out.json", "out.json"),
        ("--json=/tmp/out.json", "--json=out.json"),
        ("~/mine/prompts.jsonl", "prompts.jsonl"),
        ("{path: '/data/x/y.json', share: 1/2}", "{path: 'y.json', share: 1/2}"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("benchmarks/results/a.json", "benchmarks/results/a.json"),
    ],
)
def test_of_a_path_in_the_command_the_last_part_stays(argument: str, want: str) -> None:
    made = shlex.split(command("benchmarks.decode", ["--quick", argument]))
    assert made == ["python", "-m", "benchmarks.decode", "--quick", want]


@needs_git
def test_the_facts_of_a_run() -> None:
    script = "import json, benchmarks.run_facts as f; print(json.dumps(f.run_facts()))"
    run = subprocess.run([sys.executable, "-c", script, "/srv/x.json"], cwd=ROOT, capture_output=True, text=True)
    facts = json.loads(run.stdout)
    assert facts["command"].endswith(" x.json") and facts["date"][:2] == "20"
    assert facts["machine"]["cores"] > 0 and facts["machine"]["cpu"]
    assert all(facts["versions"][name] for name in ("python", "jax", "jaxlib", "numpy"))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (facts["versions"]["lockstep"] or "").rstrip("+") == commit[:12], "empty where nothing is a checkout"
    assert facts["machine"].keys() == {"cpu", "cores", "system"}
    assert str(ROOT) not in run.stdout


@pytest.mark.parametrize("rows", [{"speed": 2.0}, [{"speed": 2.0}]])
def test_figures_lie_beside_the_facts_of_their_run(rows: object, tmp_path: Path) -> None:
    workers.write_json(tmp_path / "out.json", rows)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.pop("run").keys() == run_facts().keys()
    assert found == (rows if isinstance(rows, dict) else {"rows": rows})


def test_figures_named_as_the_facts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a value named run"):
        workers.write_json(tmp_path / "out.json", {"run": 1})
    assert not list(tmp_path.iterdir())


def test_figures_that_are_added_to_a_file_keep_the_facts_of_the_earlier_run(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(levanter_round, "measure", lambda name, rounds: {"later_round_s": 1.0, "first_round_s": 2.0})
    for name in ("ours", "levanter", "plain"):
        monkeypatch.setattr(sys, "argv", ["levanter_round", "--json", str(tmp_path / "out.json"), "--only", name])
        assert levanter_round.main() == 0
    found = json.loads((tmp_path / "out.json").read_text())
    commands = [run["command"] for run in (*found["earlier_runs"], found["run"])]
    assert [each.split()[-1] for each in commands] == ["ours", "levanter", "plain"]
    assert found["later_rounds_over_levanter"] == 1.0 and {"ours", "levanter", "plain"} <= found.keys()


def test_rows_are_read_with_and_without_facts(tmp_path: Path) -> None:
    old = RESULTS / "2026-11-23-tpu-train-step.json"
    workers.write_json(tmp_path / "new.json", json.loads(old.read_text()))
    assert workers.read_rows(tmp_path / "new.json") == workers.read_rows(old)
