"""Groups of processes that many tests share: what a body does to them is its own test's failure alone."""

import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest

from lockstep.testing import assert_same_launches, group
from tests.multiprocess.harness import POOL, run_processes

pytestmark = pytest.mark.multiprocess

KEPT = []


def body_pid(hosts):
    print("said by body_pid")
    return os.getpid()


def body_leaves(hosts):
    """Leave one of everything behind on the last process."""
    import jax

    from lockstep.engine.schedule import scheduler
    from lockstep.testing import checks

    checks.PATIENCE_S = 0.5  # nothing of it ends by itself
    if hosts.index < hosts.count - 1:
        return
    KEPT.append(jax.device_put(1.5, jax.local_devices()[0]))
    hosts.client.set("lockstep/job/forgotten", b"")
    threading.Thread(target=time.sleep, args=(60,), name="forgotten", daemon=True).start()
    os.environ["FORGOTTEN"] = "1"
    os.chdir("tests")
    sys.path.append("forgotten")
    jax.config.update("jax_debug_nans", True)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    scheduler.Scheduler.forgotten = body_pid
    hosts.ledger.record("decode", "0" * 64)
    hosts.timeout_s = 7.0
    jax.set_mesh(jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,)))


LEFT = [
    "process 0: key of the service lockstep/job/forgotten",
    "process 1: thread forgotten",
    "process 1: array float32[], 1 of them",
    "process 1: environment variable FORGOTTEN: None became '1'",
    "process 1: working directory : ",
    "process 1: import path : ",
    "process 1: setting of jax jax_debug_nans: False became True",
    "process 1: mesh in use : Mesh(axis_sizes=(), axis_names=()) became Mesh(axis_sizes=(2,), axis_names=('x',)",
    "process 1: signal handler SIGUSR2: <Handlers.SIG_DFL: 0> became <Handlers.SIG_IGN: 1>",
    "process 1: hosts timeout_s: 240.0 became 7.0",
    "process 1: replaced lockstep.engine.schedule.scheduler:Scheduler.forgotten: None became "
    "'tests.multiprocess.test_pool'",
    "the processes have not launched the same programs",
]


def body_fails(hosts, how):
    print(f"said by process {hosts.index} in body_fails")
    if hosts.index == 1:
        if how == "raises":
            raise ValueError("boom")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    hosts.barrier("never")


@pytest.mark.slow
def test_what_a_body_leaves_behind_fails_its_test_by_name():
    with pytest.raises(AssertionError) as caught:
        run_processes(body_leaves, devices=1)
    text = str(caught.value)
    assert text.startswith("body_leaves: left behind:\n")
    assert [line for line in LEFT if line not in text] == [], text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("raises", "ValueError: boom", marks=pytest.mark.nightly),
        ("dies", "launch: process 1 failed, exit code 137, killed"),
        pytest.param("takes too long", "not done within 3 s", marks=pytest.mark.nightly),
    ],
)
def test_a_body_that_fails_ends_its_group_with_its_own_logs(how, words):
    before = run_processes(body_pid, devices=1)
    with pytest.raises(AssertionError) as caught:
        run_processes(body_fails, devices=1, args=(how,), timeout_s=3 if how == "takes too long" else 60)
    text = str(caught.value)
    assert words in text and "said by body_pid" not in text, text
    assert all(f"said by process {index} in body_fails" in text for index in (0, 1)), text
    # Who waited says where, and who raised says with what.
    assert how == "dies" or re.search(r'File ".*test_pool.py", line \d+ in body_fails', text), text
    assert how != "raises" or "  process 0: not done" in text and "how = 'raises'" in text, text
    after = run_processes(body_pid, devices=1)
    assert not set(before) & set(after)


@pytest.mark.processes(2)
class TestMarked:
    @pytest.mark.parametrize("factor", [3])
    def test_a_marked_method_runs_in_every_process_with_its_parameters_and_fixtures(self, hosts, factor, tmp_path):
        import jax

        assert (jax.process_index(), jax.process_count(), jax.local_device_count()) == (hosts.index, 2, 2)
        (tmp_path / str(hosts.index)).write_text(str(factor * hosts.index))
        hosts.barrier("written")
        assert [(tmp_path / str(index)).read_text() for index in range(2)] == ["0", "3"]


def body_launches(hosts, how):
    import jax.numpy as jnp

    if how == "together" or hosts.is_leader:
        jnp.zeros(17)
    try:
        with assert_same_launches(hosts) as launches:
            if how == "together" or hosts.is_leader:
                jnp.zeros(17)
    except AssertionError as error:
        return str(error)
    return launches


def test_a_launch_of_one_process_alone_is_named_on_all():
    pids = run_processes(body_pid)
    told = run_processes(body_launches, args=("alone",))
    assert told == ["launch 0 differs: process 0: jit(convert_element_type); process 1: nothing"] * 2
    first, second = run_processes(body_launches, args=("together",))
    assert first == second and first[0] == "jit(convert_element_type)"
    assert run_processes(body_pid) == pids


def body_skips(hosts):
    pytest.skip("it needs a TPU")


def test_a_body_that_every_process_skips_is_skipped_and_its_group_goes_on():
    pids = run_processes(body_pid)
    with pytest.raises(pytest.skip.Exception, match="it needs a TPU"):
        run_processes(body_skips)
    assert run_processes(body_pid) == pids


@pytest.mark.slow
def test_a_group_serves_many_bodies_and_ends_in_order():
    group = POOL.shared(2, 1)
    pids = run_processes(body_pid, devices=1)
    assert run_processes(body_pid, devices=1) == pids and POOL.shared(2, 1) is group
    assert run_processes(body_pid, processes=1, devices=1, own="to see that it is another")[0] not in pids
    assert run_processes(body_pid, processes=1, devices=1, env={"ANY": "thing"})[0] not in pids
    group.end()
    assert not group.running
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_processes_that_cannot_start_are_told(monkeypatch):
    monkeypatch.setenv("REQUIRE_JAX_PROCESS_COUNT", "3")
    with pytest.raises(AssertionError, match="(?s)the start of 2 processes: a process failed.*requires 3"):
        POOL.start(2, 1)


def test_a_directory_for_temporary_files_with_a_name_too_long_for_a_socket(tmp_path, monkeypatch):
    directory = tmp_path / ("x" * 130)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    made = group._make_directory()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(made / group.SOCKET))
    shutil.rmtree(made)
