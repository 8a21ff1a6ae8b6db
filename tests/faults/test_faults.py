"""One test per fault: training goes on bit for bit, or every process exits with the same clear error, in time.

The table in docs/reliability.md is made from tests/faults/table.py by scripts/make_reliability_docs.py.
"""

import functools
import importlib.util
import re
import tempfile
import time
from pathlib import Path

import pytest
from harness import run_command, run_processes

from tests.faults.table import FAULTS, GOES_ON

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
BODIES = Path(__file__).with_name("bodies.py")
BY_NAME = {fault.name: fault for fault in FAULTS}
SKIPPED = {
    "leader_tokenizer_raises",
    "prompt_file_missing_on_one_host",
    "prompts_differ",
    "configuration_differs",
    "tokenizers_differ",
    "xla_flags_differ",
    "jax_versions_differ",
    "code_differs",
    "out_of_pages",
    "out_of_device_memory_on_one_host",
    "token_ids_out_of_range",
    "deleted_model",
}
REPORT_FAILS = {"metric_raises", "metric_launches", "tracker_raises", "disk_full"}
ON_FOUR = pytest.param(4, marks=pytest.mark.slow)


@functools.cache
def went_on(processes):
    names = [f.name for f in FAULTS if f.ends == GOES_ON and (processes == 2 or f.on_four)]
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(
            f"{BODIES}:body_goes_on", processes=processes, devices=1, timeout_s=400, args=(directory, names)
        )


@functools.cache
def body(name, processes):
    return run_processes(f"{BODIES}:{name}", processes=processes, devices=1, timeout_s=240)


def check_goes_on(name, processes):
    results = went_on(processes)
    fault = BY_NAME[name]
    leader = results[0]["found"][name]
    for result in results:
        assert result["losses"]["faulty"] == result["losses"]["plain"] == results[0]["losses"]["plain"]
        found = result["found"][name]
        assert found["error"] is None, found["error"]
        assert found["launches"] == leader["launches"]
        assert (found["rounds"], found["skipped"]) == (leader["rounds"], leader["skipped"])
        assert found["seconds"] < fault.deadline_s
    assert fault.sees in leader["log"], leader["log"]
    if name in SKIPPED:
        assert (leader["rounds"], leader["skipped"], leader["report_errors"]) == (0, 1, 0)
    elif name == "errors_in_a_row":
        assert (leader["rounds"], leader["skipped"], leader["off"]) == (0, 2, True)
    else:
        assert leader["rounds"] >= 1 and leader["skipped"] == 0
        assert leader["report_errors"] == (name in REPORT_FAILS)


@pytest.mark.parametrize("processes", [2, ON_FOUR])
@pytest.mark.parametrize("name", [f.name for f in FAULTS if f.ends == GOES_ON and f.on_four])
def test_training_goes_on_after(name, processes):
    check_goes_on(name, processes)


@pytest.mark.parametrize("name", [f.name for f in FAULTS if f.ends == GOES_ON and not f.on_four])
def test_training_goes_on_on_two_processes_after(name):
    check_goes_on(name, 2)


@pytest.mark.parametrize("processes", [2, ON_FOUR])
@pytest.mark.parametrize("phase", ["reading_prompts", "generating", "reporting"])
def test_sigterm_while(phase, processes):
    results = body("body_sigterm", processes)
    leader = results[0][phase]
    for result in results:
        one = result[phase]
        assert (one["steps"], one["stopped_by"]) == (3, 15)  # the round is after step 2, the flag travels with step 3
        assert one["launches"] == leader["launches"]
        assert (one["rounds"], one["abandoned"]) == ((1, 0) if phase == "reporting" else (0, 1))
        assert one["seconds"] < BY_NAME["sigterm_while_generating"].deadline_s * 2
    if phase != "reporting":
        assert "asked to end" in leader["log"]
        assert "decode" not in leader["launches"]
    assert ("prefill" in leader["launches"]) == (phase != "reading_prompts")


@pytest.mark.parametrize("processes", [2, ON_FOUR])
def test_a_launch_of_one_host(processes):
    texts = body("body_exits", processes)
    for text in texts:
        assert text == texts[0]
    eager = texts[0]["eager"]
    assert eager.startswith("AssertionError: launch 0 differs: process 0: jit(") and "process 1: nothing" in eager
    others = "process 1" if processes == 2 else "processes 1, 2, 3"
    ledger = texts[0]["ledger"]
    pattern = rf"LaunchMismatchError: .*Launch 0 was 'decode' \(0+\) on process 0; 'init_model' .* on {others}"
    assert re.search(pattern, ledger), ledger


def test_wandb_is_missing():
    for texts in body("body_exits", 2):
        assert texts["wandb_is_missing"].startswith("PeerError: 1 of 2 processes failed")
        assert BY_NAME["wandb_is_missing"].sees in texts["wandb_is_missing"]


def test_follower_config_file_differs(tmp_path):
    demo = (ROOT / "config" / "demo.yaml").read_text()
    for index in range(2):
        (tmp_path / f"{index}.yaml").write_text(demo.replace("max_new_tokens:", f"seed: {index}\n  max_new_tokens:", 1))
    script = f"exec lockstep train-lm --config_path {tmp_path}/$LOCKSTEP_PROCESS_ID.yaml --trainer.log_dir {tmp_path}/r"
    check_exit("follower_config_file_differs", ["/bin/bash", "-c", script])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a_host_is_too_late", "late"),
        ("a_host_stalls_during_decode", "stall"),
    ],
)
def test_every_process_exits_when(name, how, tmp_path):
    command = ["python", str(ROOT / "tests" / "multiprocess" / "harness.py"), str(BODIES), "body_ends", str(tmp_path)]
    check_exit(name, [*command, f'["{how}"]'])


def check_exit(name, command):
    fault, begin = BY_NAME[name], time.monotonic()
    run = run_command(command, devices=1, timeout_s=200)
    assert run.code != 0
    # Starting the processes and compiling come first.
    assert time.monotonic() - begin < fault.deadline_s + 60
    assert fault.sees in run.output, run.output


def test_every_row_of_the_table_has_a_test():
    text = Path(__file__).read_text()
    for fault in FAULTS:
        assert fault.ends == GOES_ON or fault.name in text or fault.name.removeprefix("sigterm_while_") in text


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "make_reliability_docs.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    written = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert written == page.render(written), "run .venv/bin/python scripts/make_reliability_docs.py"
