"""hosts/ between real processes: waits, agreement, guardrails, leader-only work, and how a job ends."""

import os
import re
import subprocess
import sys
import time

import pytest

from lockstep import exits, launch
from lockstep.errors import LaunchMismatchError
from lockstep.exits import PEER_FAILED
from lockstep.hosts import DistributedConfig, Hosts, leader_only, start
from tests.multiprocess.harness import run_command, run_processes
from tests.multiprocess.host_bodies import BEHAVIOURS, LATE

pytestmark = pytest.mark.multiprocess

WAIT_S = 0.5
SCENARIO = ["python", "-m", "tests.multiprocess.scenarios"]


def body_devices_and_sizes(hosts: Hosts):
    import jax

    big = bytes(range(256)) * (33 << 12)  # 33 MiB: more than one piece
    with hosts.scope("big") as scope:
        got = scope.broadcast("v", big if hosts.is_leader else None)
        rows = scope.gather("w", got[: -hosts.index] if hosts.index else got)
        scope.barrier("end")
    hosts.barrier("deleted")  # the leader deletes what "end" made superfluous before it comes here
    before = hosts.timeout_s
    again = start(DistributedConfig(timeout_s=7.0))
    timeout_s = hosts.timeout_s
    start(DistributedConfig(timeout_s=before))
    sizes = None if rows is None else [len(row) for row in rows]
    devices = [jax.process_count(), jax.device_count(), jax.local_device_count()]
    return [got == big, sizes, devices, again is hosts, timeout_s, len(hosts.client.get_dir("lockstep/job"))]


def body_leader_only(hosts: Hosts):
    """Every kind of launch raises on the leader, inside the trainer's mesh too, and the programs still agree after."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    x = jax.make_array_from_callback((8,), rows, lambda at: np.arange(8.0, dtype=np.float32)[at])
    total = jax.jit(lambda x: (x * x).sum())
    compiled = jax.jit(lambda x: x * 3).lower(x).compile()
    launches = {
        "cached jit": lambda: total(x),
        "compiled": lambda: compiled(x),
        "eager": lambda: x + 1,
        "zeros": lambda: jnp.zeros(()),
        "new jit": lambda: jax.jit(lambda x: x - 5)(x),
    }
    with jax.set_mesh(mesh):
        for launch in launches.values():
            launch()  # on every process
        hosts.barrier("warm")
        raised = []
        if hosts.is_leader:
            for name, launch in launches.items():
                try:
                    with leader_only():
                        launch()
                except LaunchMismatchError:
                    raised.append(name)
        hosts.barrier("leader is done")
        return [raised, float(total(x))]


@pytest.mark.parametrize(
    "behaviour",  # four processes: test_numbering.py; threads wait as long for who is late: tests/unit/hosts
    [pytest.param(each, marks=[pytest.mark.slow] * (each == LATE)) for each in BEHAVIOURS],
)
def test_between_processes(behaviour):
    body, check = BEHAVIOURS[behaviour]
    check(run_processes(body, processes=2, args=(WAIT_S,)), WAIT_S)


def test_long_values_and_idempotent_start():
    first, second = run_processes(body_devices_and_sizes)
    size = 33 << 20
    assert first == [True, [size, size - 1], [2, 4, 2], True, 7.0, 0]
    assert second == [True, None, [2, 4, 2], True, 7.0, 0]


def test_leader_only_raises_on_launch():
    first, second = run_processes(body_leader_only)
    assert first == [["cached jit", "compiled", "eager", "zeros", "new jit"], 140.0]
    assert second == [[], 140.0]


@pytest.mark.slow  # in make test: unit/hosts/test_start.py, and a process that raises ends all
@pytest.mark.parametrize(
    ("env", "processes", "text"),
    [
        ({"REQUIRE_JAX_PROCESS_COUNT": "4"}, 2, "this job has 2 process(es), but REQUIRE_JAX_PROCESS_COUNT requires 4"),
        ({"REQUIRE_MULTIHOST": "1"}, 1, "this job has 1 process, but distributed.require_multihost"),
    ],
)
def test_guardrails_stop_every_process_at_once(env, processes, text):
    run = run_command([*SCENARIO, "begin", "600"], processes=processes, env=env)
    assert run.code == 1
    assert all(f"error: {text}" in log and "Start the command on every worker" in log for log in run.logs), run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_missing_process_is_waited_for_no_longer_than_told():
    codes, outputs = _run_by_hand(["begin", "2"], started=1)
    assert codes == [PEER_FAILED], outputs
    assert "not all of the 2 processes of the job" in outputs[0] and "connected within 2 s" in outputs[0]


@pytest.mark.slow
def test_plain_python_needs_no_service():
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    run = subprocess.run(
        [sys.executable, *SCENARIO[1:], "begin"], env={**env, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("lockstep: process 0 of 1 on ") and "backend cpu" in run.stderr


@pytest.mark.parametrize("bare", [[], pytest.param(["bare"], marks=pytest.mark.slow)], ids=["run_main", "bare"])
@pytest.mark.parametrize("victim", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_one_process_that_raises_ends_all(victim, bare):
    """Without the launcher's help: the processes are started by hand, and the others wait in a barrier."""
    codes, outputs = _run_by_hand([*bare, "fail", victim])
    other = 1 - int(victim)
    assert codes[int(victim)] == 1 and codes[other] == 85, outputs
    assert "ValueError: boom" in outputs[int(victim)] and "Traceback" in outputs[int(victim)]
    assert f"process {other} ends because process {victim} failed: ValueError: boom" in outputs[other]
    assert "Terminating process" not in outputs[other]
    assert "step 2 is written" in outputs[0]
    lost = "lockstep: reports: this process ends, and what is not done is lost: step 4 (3 rows). "
    assert lost in outputs[0] and "lost" not in outputs[1]


@pytest.mark.slow
def test_an_error_of_all_is_said_after_the_leader_has_closed_what_is_open():
    codes, outputs = _run_by_hand(["close"])
    assert codes == [1, 1], outputs
    assert re.search("closed\n.*learning rate", outputs[0], re.DOTALL) and "learning rate" not in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("bare", [pytest.param([], marks=pytest.mark.nightly), ["bare"]], ids=["run_main", "bare"])
def test_threads_that_ask_the_service_at_the_end_abort_nobody(bare):
    """Python would end them where they come back from C++, which takes that for an exception that nothing may throw."""
    codes, outputs = _run_by_hand([*bare, "ask"])
    assert codes == [0, 0] and "terminate called" not in "".join(outputs), outputs


@pytest.mark.parametrize(
    ("victim", "where"),
    [
        pytest.param("0", "waiting", marks=pytest.mark.nightly),
        ("1", "working"),
        pytest.param("0", "working", marks=pytest.mark.nightly),
        pytest.param("1", "waiting", marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_one_process_ends_all(where, victim):
    """A loop of one's own, which catches no signal: JAX's preemption service would swallow it.

    Also where the process waits for the others in a call that Python's signal handlers cannot interrupt.
    """
    codes, outputs = _run_by_hand(["terminate", victim, where])
    assert codes == [143, 143], outputs
    text = f"was asked to end (SIGTERM) in phase '{where}'"
    assert f"lockstep: process {victim} of 2 {text}" in outputs[int(victim)]
    assert f"because process {victim} {text}" in outputs[1 - int(victim)]
    assert "Traceback" not in "".join(outputs)


@pytest.mark.slow
def test_watchdog_ends_a_process_that_waits_in_a_collective():
    codes, outputs = _run_by_hand(["stuck"])
    assert codes[0] == exits.WATCHDOG, outputs
    assert codes[1] in (85, exits.WATCHDOG), outputs
    report = outputs[0]
    assert "lockstep watchdog: 'decode' on process 0 of 2 did not end within 2 s" in report
    assert "process 0: last phase 'launching decode'" in report
    assert "process 1: last phase 'reading a slow disk'" in report
    assert "lockstep watchdog: last launches here: none" in report
    assert "in stuck" in report and "Terminating process" not in outputs[1]


def test_a_launch_that_fails_on_one_process_after_all_agreed_ends_all_within_seconds():
    """Without the watchdog's time-out, which is 600 s; a launch that fails on all ends none."""
    start = time.monotonic()
    codes, outputs = _run_by_hand(["alone_in_a_launch"])
    assert time.monotonic() - start < 60 and codes == [PEER_FAILED, PEER_FAILED], outputs
    text = "in 'decode', in which process 1 failed by itself: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert f"lockstep: process 0 ends: it waits {text}" in outputs[0]
    assert f"process 1 ends because process 0 failed: {text}" in outputs[1]
    assert all(output.count("both went on") == 1 for output in outputs)


@pytest.mark.slow
def test_the_service_listens_on_loopback_alone_and_a_forged_end_is_a_failure():
    run = run_command([*SCENARIO, "attacked"])
    assert run.code != 0 and "launch: failed" in run.output, run.output
    assert "OTHER ADDRESSES" not in run.output and "\x1b" not in run.output and "\x07" not in run.output
    assert run.output.count(r"ends because process 9 done \x1b[2J\x1b]0;title\x07") >= 2


@pytest.mark.slow
def test_a_service_that_the_user_started_is_used():
    codes, outputs = _run_by_hand(["adopt"])
    assert codes == [0, 0], outputs
    assert [f"process {i} of 2" in output for i, output in enumerate(outputs)] == [True, True]


def _run_by_hand(arguments: list[str], started: int = 2) -> tuple[list[int], list[str]]:
    """Two processes with nobody above them that would end one when the other fails."""
    options = launch.parse(["--processes", "2", "--", "x"])
    address = f"127.0.0.1:{launch.free_port()}"
    running = [
        subprocess.Popen(
            [sys.executable, *SCENARIO[1:], *arguments],
            env=launch.local_environment(os.environ, options, address, index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(started)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], outputs
