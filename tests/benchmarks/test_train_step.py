"""What the benchmark of the train step makes of what its jobs say."""

import dataclasses
import json
import sys
import types

import pytest

from benchmarks import train_step as bench


def process(number, *, made=2.0, first=5.0, step=0.5, imported=100, peak=300):
    """The figures of a process of a run of four steps."""
    return {
        "process": number,
        "trainer_made": made,
        "steps_done": [first + step * done for done in range(4)],
        "losses": [10.0, 9.0, 8.0, 7.0],
        "compile_s": 1.5,
        "imported_bytes": imported,
        "peak_bytes": peak,
        "temporaries_bytes": 10 * (number + 1),
    }


def test_a_job_has_the_times_of_its_first_process_and_the_memory_of_all():
    run = bench.Run.of([process(1, first=9.0, imported=7, peak=30), process(0)])
    assert dataclasses.asdict(run) == {
        "first_step_s": 5.0,
        "from_trainer_s": 3.0,
        "compile_s": 1.5,
        "steps_s": [0.5, 0.5, 0.5],
        "losses": [10.0, 9.0, 8.0, 7.0],
        "imported_bytes": 107,
        "peak_bytes": 330,
        "temporaries_bytes": 20,
    }


def test_ratios_are_ours_over_levanters_and_more_memory_is_worse():
    ours = [bench.Run.of([process(0, step=step, first=4.0)]) for step in (0.25, 0.25, 9.0)]
    levanter = [bench.Run.of([process(0, peak=200)])]
    found = bench.compare(ours, levanter)
    assert found["ours_tokens_per_s"] == 4 * bench.ROWS * bench.LENGTH, "one slow turn of three does not count"
    ratios = {name: value for name, value in found.items() if name.endswith("_vs_levanter")}
    assert ratios == {
        "tokens_vs_levanter": 2.0,
        "first_step_vs_levanter": 0.8,
        "first_step_from_trainer_vs_levanter": pytest.approx(2 / 3),
        "memory_vs_levanter": 2.0,
        "memory_with_imports_vs_levanter": 1.5,
    }


def test_every_place_has_a_row_for_each_goal(capsys):
    figures = {f"{name}_vs_levanter{place.suffix}": 0.9 for name in bench.GOALS for place in bench.PLACES}
    bench.show(figures, bench.PLACES)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and [line.rsplit(": ", 1)[1] for line in lines[-3:]] == ["not met)", "met)", "met)"]
    assert lines[-1].startswith("memory_vs_levanter_2x2: 0.900 ")


class Trainer:
    """What both trainers have in common; hooks are called once more at the end."""

    def __init__(self):
        self.hooks = []

    def add_hook(self, hook):
        self.hooks.append(hook)

    def train(self, steps):
        for step in [*range(steps), steps - 1]:
            for hook in self.hooks:
                hook(types.SimpleNamespace(step=step, loss=float(step)))
        return "trained"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark reads /proc")
def test_a_record_takes_down_each_step_once(tmp_path):
    record = bench.Record(tmp_path / "modules.json")
    record.watch(Trainer)
    assert Trainer().train(3) == "trained"
    figures = record.figures
    assert figures["losses"] == [0.0, 1.0, 2.0] and figures["process"] == 0
    moments = [figures["imported_s"], figures["trainer_made"], *figures["steps_done"]]
    assert moments == sorted(moments) and 0 < moments[0] and len(moments) == 5
    assert figures["peak_bytes"] >= figures["imported_bytes"] > 2**20


def test_what_the_first_run_imports_the_others_import_at_once(tmp_path, monkeypatch):
    bench.Record(file := tmp_path / "modules.json").keep_modules()
    assert {"json", "benchmarks.train_step"} <= set(json.loads(file.read_text()))
    file.write_text(json.dumps(["no.such.module", "imported_late"]))
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    bench.Record(file).watch(type("Trainer", (), {"__init__": lambda self: None, "train": lambda self: None}))
    assert "imported_late" in sys.modules
    del sys.modules["imported_late"]
