"""`lockstep check` finds nothing in our scripts, and takes at most twice their time; in Levanter's, what is there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.launcher import LAUNCHER

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
CHECK = [sys.executable, "-c", "import sys; from lockstep.main.cli import main; sys.exit(main())", "check"]
LAUNCH = [sys.executable, str(LAUNCHER), "--backend", "local"]
SIZE = ["--processes", "2", "--devices_per_process", "2", "--"]
TIMES_LONGER = 2.0


def commands(directory):
    sampled = ["--steps", "6", "--eval_every", "3", "--output_dir", str(directory / "out")]
    demo = ["--config_path", "config/demo.yaml", "--trainer.num_train_steps", "6", "--trainer.log_dir", str(directory)]
    return {
        "demo": ["lockstep", "train-lm", *demo, "--inference_eval.eval_every", "3"],
        "own_loop": ["python", "examples/own_loop.py", *sampled],
        "dict_loop": ["python", "examples/dict_loop.py", *sampled],
        "nnx_loop": ["python", "examples/nnx_loop.py", *sampled],
    }


def timed(*command):
    """How a command ended, and after how many seconds; compiled programs are not shared, as in a user's first run."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return done, time.monotonic() - began


@pytest.mark.parametrize("name", ["demo", "own_loop", "dict_loop", "nnx_loop"])
def test_nothing_is_found(name, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "checked").mkdir()
    plain, plain_s = timed(*LAUNCH, *SIZE, *commands(tmp_path / "plain")[name])
    assert plain.returncode == 0, plain.stdout + plain.stderr
    file = tmp_path / "found.json"
    checked, checked_s = timed(*CHECK, "--json", str(file), *SIZE, *commands(tmp_path / "checked")[name])
    found = json.loads(file.read_text())
    assert (checked.returncode, found["findings"], found["problem"]) == (0, [], None), checked.stdout + checked.stderr
    assert min(found["launches"]) > 10 and len(set(found["launches"])) == 1
    assert checked_s < TIMES_LONGER * plain_s, f"{checked_s:.0f} s, and {plain_s:.0f} s without"


def test_levanters_own_command(tmp_path):
    """Its first run builds a token cache, of which process 0 sends word from a thread; the next one does not.

    Both findings are that broadcast: docs/check.md says what was verified by hand.
    """
    lines = (ROOT / "examples/levanter_train_lm.yaml").read_text().split("\ninference_eval:")[0]
    config = tmp_path / "config.yaml"
    config.write_text(lines)
    arguments = ["--config_path", str(config), "--data.cache_dir", str(tmp_path / "cache")]
    arguments += ["--trainer.num_train_steps", "6", "--trainer.log_dir", str(tmp_path / "logs")]
    # By default it asks the Hub for the tokenizer of another model.
    arguments += ["--model.reference_checkpoint", "data/demo/tokenizer", "--model.tokenizer", "data/demo/tokenizer"]
    script = ["python", "-m", "levanter.main.train_lm", *arguments]
    for name, expected in (("cold", {"thread", "one_process"}), ("warm", set())):
        file = tmp_path / f"{name}.json"
        base = ["--trainer.checkpointer.base_path", str(tmp_path / name), "--trainer.id", name]
        run, _ = timed(*CHECK, "--json", str(file), *SIZE, *script, *base)
        found = json.loads(file.read_text())
        findings = found["findings"]
        assert {each["kind"] for each in findings} == expected, run.stdout + run.stderr
        assert (run.returncode, found["problem"]) == (bool(expected), None), run.stdout + run.stderr
        assert len(findings) == len(expected)
        for each in findings:
            frames = [frame for place in each["places"] for frame in place["stack"]]
            assert any(frame.endswith("broadcaster") for frame in frames), each
        assert min(found["launches"]) > 100
