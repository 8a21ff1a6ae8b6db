"""``lockstep check`` on scripts that each have one bug, which no run on CPU shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.check import KINDS
from lockstep.check.run import HOOK

ROOT = Path(__file__).parents[2]
BUGS = ROOT / "examples" / "pod_bugs"
MARK = re.compile(r"# BUG: (\w+)$", re.MULTILINE)
CHECK = "import sys; from lockstep.main.cli import main; sys.argv[0] = 'lockstep'; main()"


def marked(script):
    """The places in a script that the check should name: kind, file and line."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return {(match[1], f"{script}:{number}") for number, line in enumerate(lines, 1) if (match := MARK.search(line))}


def test_a_python_without_lockstep_runs_the_sitecustomize_behind_ours(tmp_path):
    """A script may start Pythons of other environments."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "sitecustomize.py").write_text(HOOK)
    (tmp_path / "theirs" / "lockstep").mkdir(parents=True)
    (tmp_path / "theirs" / "lockstep" / "__init__.py").write_text("raise ImportError('there is none')")
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs')")
    path = os.pathsep.join(str(tmp_path / name) for name in ("ours", "theirs"))
    done = subprocess.run(
        [sys.executable, "-c", "print('script')"], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("theirs\nscript\n", "")


def found(report):
    """Kind and lines of each finding of a report."""
    return {(each["kind"], place["line"]) for each in report["findings"] for place in each["places"]}


def check(directory, *words):
    """Exit code, report and output of a check."""
    file = directory / "report.json"
    command = [sys.executable, "-c", CHECK, "check", "--json", str(file), "--html", str(directory / "report.html")]
    run = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert file.exists(), run.stdout + run.stderr
    return run.returncode, json.loads(file.read_text(encoding="utf-8")), run.stdout


@pytest.mark.slow
def test_each_bug_is_found_on_its_line_and_nothing_else(tmp_path):
    scripts = [script for script in sorted(BUGS.glob("*.py")) if script.stem not in ("all", "pod", "some_enter")]
    code, report, output = check(tmp_path, "--", "python", str(BUGS / "all.py"))
    assert code == 1
    assert report["problem"] is None, output
    expected = set().union(*map(marked, scripts))
    assert len(expected) >= len(scripts) and {kind for kind, _ in expected} == {*KINDS} - {"some_enter"}
    assert expected <= found(report), expected - found(report)
    for finding in report["findings"]:
        assert any((finding["kind"], place["line"]) in expected for place in finding["places"]), finding
        assert {place["process"] for place in finding["places"]} == {0, 1}, finding
    for kind, line in expected:
        assert kind in output and line.removeprefix(f"{ROOT}/") in output


@pytest.mark.slow
def test_a_script_without_a_bug_passes_and_joins_the_job_by_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "assert jax.process_count() == 2 and jax.device_count() == 4\n"
        "step = jax.jit(lambda x: (x * 0.9, x.sum()), donate_argnums=0)\n"
        "x = jax.jit(lambda: jnp.ones(8), out_shardings=NamedSharding(mesh, P('data')))()\n"
        "for _ in range(200):\n"  # by itself this deadlocks on CPU: nothing waits for a result
        "    x, total = step(x)\n"
        "if jax.process_index() == 0:\n"
        "    print('loss', jax.local_devices()[0].id)\n"
    )
    code, report, output = check(tmp_path, "--", "python", str(script))
    assert code == 0 and report["findings"] == [], output
    assert "✓ nothing found" in output and report["launches"][0] == report["launches"][1] > 200


@pytest.mark.slow
def test_processes_that_wait_for_others_are_named_and_ended(tmp_path):
    script = BUGS / "some_enter.py"
    code, report, output = check(tmp_path, "--stall_s", "6", "--", "python", str(script))
    assert code == 1 and "waited for each other" in report["problem"], output
    (finding,) = report["findings"]
    assert marked(script) == {(finding["kind"], finding["places"][0]["line"])}
    assert [place["process"] for place in finding["places"]] == [0, 1]
    assert "has come to its end" in finding["places"][1]["text"]


@pytest.mark.slow
def test_devices_that_stop_in_a_launch_of_all_are_ended_and_nobody_is_accused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import Mesh, PartitionSpec as P\n"
        "mesh = Mesh(jax.local_devices(), 'data')\n"
        "def stop(x):\n"
        "    threading.Event().wait()\n"
        "hang = lambda x: jax.pure_callback(stop, jax.ShapeDtypeStruct(x.shape, x.dtype), x)\n"
        "step = jax.jit(jax.shard_map(hang, mesh=mesh, in_specs=P('data'), out_specs=P('data')))\n"
        "print(step(np.ones(8, np.float32)))\n"
    )
    code, report, output = check(tmp_path, "--stall_s", "6", "--", "python", str(script))
    assert code == 1 and report["findings"] == [], output
    assert "a launch that all have made" in report["problem"]


@pytest.mark.nightly  # in make slow: the same finding among all bugs above
def test_a_difference_is_told_while_the_script_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import time, jax, jax.numpy as jnp\n"
        "x = jnp.arange(8.0)\n"
        "for step in range(8):\n"
        "    x = x * 0.9\n"
        "    if jax.process_index() == 0 and step == 1:\n"
        "        print(float(jnp.linalg.norm(x)))\n"
        "    time.sleep(1.5)\n"
        "print('the last line')\n"
    )
    code, report, output = check(tmp_path, "--", "python", str(script))
    assert code == 1 and {each["kind"] for each in report["findings"]} == {"one_process"}, output
    told = output.index("lockstep check: one_process: ")
    assert f"{script}:6" in output[told:].splitlines()[0]
    assert told < output.index("the last line") < output.index("On a pod: ")


@pytest.mark.nightly
def test_without_the_check_the_scripts_pass_in_several_processes_and_in_one():
    words = ["launch", "--processes", "2", "--devices_per_process", "2", "--", "python", str(BUGS / "all.py")]
    run = subprocess.run([sys.executable, "-c", CHECK, *words], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("all.py", "some_enter.py"):
        alone = subprocess.run([sys.executable, str(BUGS / name)], capture_output=True, text=True, timeout=170)
        assert alone.returncode == 0, alone.stderr
