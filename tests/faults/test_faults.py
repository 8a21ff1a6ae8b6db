"""One test per fault: training goes on bit for bit, or every process exits with the same clear error, in time.

The page of faults in the documentation is made from tests/faults/table.py by scripts/make_fault_docs.py.
"""

import json
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.testing.pool import function_command
from tests.faults import bodies, checkpoint_bodies, report_bodies
from tests.faults.measured import record
from tests.faults.table import FAULTS, GOES_ON
from tests.multiprocess.harness import cached, run_command, run_processes, run_unattended

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
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
    "stop_finder_raises_on_one_host",
    "commit_raises_on_one_host",
    "prefill_cannot_be_placed_on_one_host",
    "audit_cannot_be_placed_on_one_host",
    "token_ids_out_of_range",
    "deleted_model",
}
REPORTS = ["metric_never_returns", "metric_is_slow", "judge_does_not_answer", "file_system_hangs", "tracker_blocks"]
"""In these the report takes longer than the trainer waits for anything, or never ends."""
ROUNDS = [
    f
    for f in FAULTS
    if f.ends == GOES_ON and f.name not in ("trainers_tracker_blocks", "report_hangs_while_saving", *REPORTS)
]
FAST = {"leader_tokenizer_raises", "prompts_differ", "out_of_pages", "stop_finder_raises_on_one_host", "metric_raises"}
"""Faults of every phase, one run for which is in make test; a run for all others is slow."""
REPORT_FAILS = {
    "tracker_launches": 1,
    "metric_raises": 1,
    "metric_backtracks": 1,
    "metric_launches": 1,
    "tracker_raises": 1,
    "disk_full": 2,  # the rows, and the round of the alarms
}
"""Errors that are counted in the reports of a round, by fault."""
ON_FOUR = pytest.param(4, marks=pytest.mark.nightly)


@cached
def went_on(processes, fast):
    names = [f.name for f in ROUNDS if (processes == 2 or f.on_four) and (f.name in FAST) == fast]
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(
            bodies.body_goes_on,
            processes=processes,
            devices=2 if fast else 1,  # in the group of most other tests
            timeout_s=400,
            args=(directory, names),
            own="" if fast else "the thread of a tracker that raised keeps the error, and with it the model of then",
        )


@cached
def reports():
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(report_bodies.body_reports, devices=1, timeout_s=240, args=(directory, REPORTS))


@cached
def saved_while_a_report_hangs():
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(checkpoint_bodies.body_checkpoints, devices=1, timeout_s=240, args=(directory,))


@cached
def exits():
    return run_processes(bodies.body_exits, timeout_s=240)  # in the group of most other tests


@cached
def sigterms(processes):
    """What each process saw, and the bytes of the weights that were saved, by directory."""
    with tempfile.TemporaryDirectory() as directory:
        found = run_processes(bodies.body_sigterm, processes=processes, devices=1, timeout_s=400, args=(directory,))
        weights = Path(directory).rglob("model.safetensors")
        return found, {str(file.parent.relative_to(directory)): file.read_bytes() for file in weights}


def check_time(name, processes, seconds, case=""):
    """In time, and kept for the table. On 4 processes, which share two cores, everything takes twice as long."""
    record(name, processes, seconds, case)
    assert seconds < BY_NAME[name].deadline_s * processes / 2


def check_sees(name, log):
    """The user is told what the table says, or nothing at all."""
    sees = BY_NAME[name].sees
    assert sees in log if sees else not log, log


def fast_or_slow(name):
    return pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))


def check_goes_on(name, processes):
    results = went_on(processes, name in FAST)
    leader = results[0]["found"][name]
    for result in results:
        assert result["losses"]["faulty"] == result["losses"]["plain"] == results[0]["losses"]["plain"]
        found = result["found"][name]
        assert found["error"] is None, found["error"]
        assert found["launches"] == leader["launches"]
        assert (found["rounds"], found["skipped"]) == (leader["rounds"], leader["skipped"])
    check_time(name, processes, max(result["found"][name]["seconds"] for result in results))
    check_sees(name, leader["log"])
    if name in SKIPPED:
        assert (leader["rounds"], leader["skipped"], leader["report_errors"]) == (0, 1, 0)
    elif name == "errors_in_a_row":
        assert (leader["rounds"], leader["skipped"], leader["off"]) == (0, 2, True)
    else:
        assert leader["rounds"] >= 1 and leader["skipped"] == 0
        assert leader["report_errors"] == REPORT_FAILS.get(name, 0)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [fast_or_slow(f.name) for f in ROUNDS if f.on_four])
def test_training_goes_on_after(name, processes):
    check_goes_on(name, processes)


@pytest.mark.parametrize("name", [fast_or_slow(f.name) for f in ROUNDS if not f.on_four])
def test_training_goes_on_on_two_processes_after(name):
    check_goes_on(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "phase",
    ["compiling_the_train_step", "reading_prompts", "preparing", "generating", "decoding", "auditing", "reporting"],
)
def test_sigterm_while(phase, processes):
    results, _ = sigterms(processes)
    leader = results[0]["phases"][phase]
    compiling, complete = phase == "compiling_the_train_step", phase in ("decoding", "auditing", "reporting")
    for result in results:
        one = result["phases"][phase]
        # The round is after step 2; the flag travels with the next step.
        assert (one["steps"], one["stopped_by"]) == (1 if compiling else 3, signal.SIGTERM)
        assert one["launches"] == leader["launches"]
        assert (one["rounds"], one["abandoned"]) == (int(complete), int(not complete and not compiling))
    check_sigterm_time(phase, results)
    check_sees(f"sigterm_while_{phase}", leader["log"])
    assert ("decode" in leader["launches"]) == complete
    assert ("prefill" in leader["launches"]) == (complete or phase == "generating")


def check_sigterm_time(phase, results):
    (struck,) = (time for result in results for time in result["phases"][phase]["struck"])
    ended = max(result["phases"][phase]["ended"] for result in results)
    check_time(f"sigterm_while_{phase}", len(results), ended - struck)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_sigterm_saves_the_weights_of_the_step_it_stopped_at(processes):
    results, saved = sigterms(processes)
    assert [result["codes"] for result in results] == [[143, 0, 0]] * processes
    assert saved.keys() == {"run-50/hf-step-3", "run-3/hf", "signalled/run-3/hf"}
    assert saved["run-50/hf-step-3"] == saved["signalled/run-3/hf"] == saved["run-3/hf"]
    check_sigterm_time("saving", results)
    for result in results:
        check_sees("sigterm_while_saving", result["phases"]["saving"]["log"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, ON_FOUR])
def test_a_launch_of_one_host(processes):
    results = run_processes(bodies.body_launch_of_one_host, processes=processes, devices=1, timeout_s=240)
    texts = [result["texts"] for result in results]
    for text in texts:
        assert text == texts[0]
    eager = texts[0]["eager"]
    assert eager.startswith("AssertionError: launch 0 differs: process 0: jit(") and "process 1: nothing" in eager
    others = "process 1" if processes == 2 else "processes 1-3"
    ledger = texts[0]["ledger"]
    pattern = rf"LaunchMismatchError: .*Launch \d+ was 'decode' \(0+\) on process 0; 'init_state' .* on {others}"
    assert re.search(pattern, ledger), ledger
    check_time("a_launch_of_one_host", processes, max(result["seconds"]["ledger"] for result in results))


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_training_goes_on_whatever_the_report_does(name):
    found = reports()
    results = [result[name] for result in found]
    plain = found[0]["none"]["losses"]
    leader, other = results
    assert leader["losses"] == other["losses"] == plain
    assert (leader["rounds"], other["rounds"], leader["errors"]) == (1, 1, 0)
    check_sees(name, leader["log"])
    check_time(name, 2, max(one["seconds"] for one in results))
    # What hung comes to an end in the test: then the whole report is there.
    assert leader["late"] and other["rows"] == []
    step = report_bodies.EVERY
    assert leader["rows"] == [[step, number, 1.0] for number in range(len(report_bodies.PROMPTS))]


@pytest.mark.slow
def test_report_hangs_while_saving():
    name, results = "report_hangs_while_saving", saved_while_a_report_hangs()
    for result in results:
        hanging, plain = result["hangs"], result["plain"]
        assert hanging["losses"] == plain["losses"] == results[0]["plain"]["losses"]
        assert (hanging["saved"], hanging["errors"]) == (plain["saved"], 0) and len(plain["saved"]) == 2
        assert hanging["late"]
    # What the report hangs in costs training no more than it may, whatever the number of checkpoints.
    check_time(name, 2, max(result["hangs"]["steps_s"] for result in results))
    log = results[0]["hangs"]["log"]
    check_sees(name, log)
    assert log.count(BY_NAME[name].sees) == 1


@pytest.mark.slow
def test_sigterm_while_a_report_hangs():
    name, results = "sigterm_while_a_report_hangs", saved_while_a_report_hangs()
    for result in results:
        for one in result.values():
            assert (one["stopped_by"], one["newest"]) == (signal.SIGTERM, f"step-{checkpoint_bodies.STEPS + 1}")
    check_time(name, 2, max(result["hangs"]["end_s"] for result in results))
    check_sees(name, results[0]["hangs"]["log"])


@pytest.mark.slow
def test_the_trainers_tracker_blocks():
    name = "trainers_tracker_blocks"
    blocked = [result["blocked"] for result in exits()]
    for one in blocked:
        assert one["plain"]["losses"] == one["blocked"]["losses"] == blocked[0]["plain"]["losses"]
    assert BY_NAME[name].sees in blocked[0]["log"]
    check_time(name, 2, max(one["blocked"]["seconds"] for one in blocked))


@pytest.mark.slow
def test_on_error_raise_is_the_same_error_everywhere():
    texts = {result["texts"]["round"] for result in exits()}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("PeerError: 1 of 2 processes failed") and "/no/such/file.txt' does not exist" in text


@pytest.mark.slow
def test_wandb_is_missing():
    for result in exits():
        assert result["texts"]["wandb_is_missing"].startswith("PeerError: 1 of 2 processes failed")
        assert BY_NAME["wandb_is_missing"].sees in result["texts"]["wandb_is_missing"]
    check_time("wandb_is_missing", 2, max(result["seconds"]["wandb_is_missing"] for result in exits()))


@pytest.mark.slow
def test_a_second_thread_cannot_launch_during_training_or_a_round():
    for result in exits():
        threads = result["threads"]
        assert "thread guard" in threads["training"] and "thread guard" in threads["round"], threads
        assert (threads["after"], threads["rounds"]) == ("", 1)


@pytest.mark.slow
def test_follower_config_file_differs(tmp_path):
    demo = (ROOT / "config" / "demo.yaml").read_text()
    for index in range(2):
        (tmp_path / f"{index}.yaml").write_text(demo.replace("max_new_tokens:", f"seed: {index}\n  max_new_tokens:", 1))
    script = f"exec lockstep train-lm --config_path {tmp_path}/$LOCKSTEP_PROCESS_ID.yaml --trainer.log_dir {tmp_path}/r"
    name, begin = "follower_config_file_differs", time.monotonic()
    run = run_command(["/bin/bash", "-c", script], devices=1, timeout_s=200)
    assert run.code != 0
    assert [BY_NAME[name].sees in log for log in run.logs] == [True, False], "it is said once"
    check_time(name, 2, time.monotonic() - begin)  # from the start of the processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param("a_host_is_too_late", "late", marks=pytest.mark.nightly), ("a_host_stalls_during_decode", "stall")],
)
def test_every_process_exits_when(name, how, tmp_path):
    """No launcher ends them."""
    ends = run_unattended(ends_command(how), timeout_s=400)
    for end in ends:
        assert end.code != 0 and BY_NAME[name].sees in end.log, end.log
    (struck,) = (float(time) for end in ends for time in re.findall(r"struck at ([\d.]+)", end.log))
    check_time(name, 2, max(end.at for end in ends) - struck)


def ends_command(*arguments):
    return function_command(bodies.body_ends, *arguments)


DEATHS = [(leader, *moment) for leader in (False, True) for moment in (("before", 2), ("during", 2), ("after", 2))]
DEATHS += [(False, "during", 4), (False, "after", 4), (True, "during", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leader", "when", "processes"),
    [pytest.param(*death, marks=[pytest.mark.nightly] * (death[1:] != ("during", 2))) for death in DEATHS],
)
def test_a_host_or_the_leader_dies(leader, when, processes, tmp_path):
    name = "the_leader_dies" if leader else f"a_host_dies_{when}_generation"
    check_death(name, when, 0 if leader else processes - 1, processes, tmp_path)


def check_death(name, when, victim, processes, directory):
    """No launcher ends the survivors."""
    # Compiling comes first.
    ends = run_unattended(ends_command(f"die {when}", victim), processes=processes, timeout_s=200.0 * processes)
    assert ends[victim].code == -signal.SIGKILL and ends[victim].seconds == 0
    for index, end in enumerate(ends):
        if index != victim:
            assert end.code != 0, end
            assert re.search(rf"Missing: process {victim}\b", end.log), end.log
            print(f"{name}, {when}: process {index} of {processes} ended {end.seconds:.1f} s later with {end.code}")
    check_time(name, processes, max(end.seconds for end in ends), when)


def test_every_row_of_the_table_has_a_test():
    text = Path(__file__).read_text(encoding="utf-8")
    for fault in FAULTS:
        names = {fault.name, fault.name.removeprefix("sigterm_while_")}
        names.add(re.sub("_dies_(before|during|after)_", "_dies_{when}_", fault.name))
        assert fault in ROUNDS or any(f'"{name}"' in text for name in names), fault.name


def test_every_row_was_measured():
    seen = json.loads((Path(__file__).parent / "seconds.json").read_text())
    missing = [fault.name for fault in FAULTS if "2" not in seen.get(fault.name, {})]
    assert not missing, f"run these tests, then .venv/bin/python scripts/make_fault_docs.py: {missing}"
