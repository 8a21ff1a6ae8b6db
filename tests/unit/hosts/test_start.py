"""Configuration, guardrails and the plain single process."""

import os
import random
import re
import socket
import subprocess
import sys
import threading

import jax
import pytest

from lockstep.errors import ConfigError, HostError, HostTimeoutError
from lockstep.exits import PEER_FAILED, is_retried
from lockstep.hosts import DistributedConfig, Hosts, JobHosts, MemoryClient, current, start
from lockstep.hosts.start import number_processes
from tests.multiprocess.harness import run_threads

module = sys.modules[start.__module__]


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """As in a process that has not started and was not launched."""
    monkeypatch.setattr(module, "_hosts", None)
    monkeypatch.setattr(module, "_stop_watching", None)
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"LOCKSTEP_{name}", raising=False)
    for name in ("REQUIRE_MULTIHOST", "REQUIRE_JAX_PROCESS_COUNT", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", *SLURM_STEP):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_process_starts_alone(capsys):
    early = current()
    hosts = start(DistributedConfig(timeout_s=3.0))
    assert (hosts.index, hosts.count, hosts.is_leader, hosts.timeout_s) == (0, 1, True, 3.0)
    assert hosts is start() is current() and early.count == 1
    assert start(DistributedConfig(timeout_s=4.0)).timeout_s == 4.0
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("lockstep: process 0 of 1 on ")


@pytest.mark.parametrize(
    ("config", "env", "text"),
    [
        ({"require_multihost": True}, {}, "this job has 1 process, but distributed.require_multihost"),
        ({}, {"REQUIRE_MULTIHOST": "1"}, "REQUIRE_MULTIHOST=1\\) requires at least 2. Start the command on every"),
        ({"require_process_count": 8}, {}, "has 1 process\\(es\\), but distributed.require_process_count requires 8"),
        ({}, {"REQUIRE_JAX_PROCESS_COUNT": "2"}, "has 1 process\\(es\\), but REQUIRE_JAX_PROCESS_COUNT requires 2"),
        ({}, {"REQUIRE_JAX_PROCESS_COUNT": "two"}, "REQUIRE_JAX_PROCESS_COUNT is 'two'; it must be a whole number"),
        ({}, {"REQUIRE_MULTIHOST": "maybe"}, "REQUIRE_MULTIHOST is 'maybe'; use 1"),
        ({"num_processes": 2}, {}, "distributed.coordinator_address and distributed.process_id is not set"),
        ({"process_id": 0}, {"LOCKSTEP_NUM_PROCESSES": "2"}, "distributed.coordinator_address is not set"),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 2},
            {},
            "process_id is 2; with 2 processes it must be 0 to 1",
        ),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 0, "require_process_count": 4},
            {},
            "this job has 2 process\\(es\\), but distributed.require_process_count requires 4",
        ),
    ],
)
def test_start_refuses(monkeypatch, config, env, text):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        start(DistributedConfig(**config))


SLURM_STEP = {f"SLURM_{name}": "0" for name in ("JOB_ID", "STEP_NODELIST", "PROCID", "LOCALID")}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"LOCKSTEP_NUM_PROCESSES": "2"}, r"2 processes were started \(the variable LOCKSTEP_NUM_PROCESSES\), but"),
        ({"SLURM_NTASKS": "4", **SLURM_STEP}, r"4 processes .*SLURM_NTASKS.* has 1: .* Call lockstep\.start\(\)"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, r"3 processes .*OMPI_COMM_WORLD_SIZE"),
        ({"WORLD_SIZE": "8", "RANK": "1"}, r"8 processes .*WORLD_SIZE.*process_id=int\(os\.environ\['RANK'\]\)"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, "4 processes .*TPU_WORKER_HOSTNAMES"),
        ({"REQUIRE_JAX_PROCESS_COUNT": "2"}, "has 1 process.*REQUIRE_JAX_PROCESS_COUNT requires 2"),
        ({"SLURM_NTASKS": "4"}, None),  # a batch script, of which Slurm has started one
        ({"WORLD_SIZE": "8"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"LOCKSTEP_NUM_PROCESSES": "1", "SLURM_NTASKS": "4", **SLURM_STEP}, None),  # the innermost launcher counts
        ({"SLURM_NTASKS": "4", **SLURM_STEP, "REQUIRE_JAX_PROCESS_COUNT": "1"}, None),
    ],
)
def test_processes_that_a_launcher_has_started_and_that_have_not_joined_are_refused(monkeypatch, env, text):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if text is None:
        assert current().count == JobHosts()().count == 1
        return
    for find in (current, JobHosts()):
        with pytest.raises(ConfigError, match=text):
            find()


def test_what_was_found_before_the_user_started_the_service_is_looked_up_anew(monkeypatch):
    early, client = current(), MemoryClient.hub(2)[0]
    monkeypatch.setattr(module, "service_is_running", lambda: True)
    monkeypatch.setattr(module, "JaxClient", lambda: client)
    assert early.count == 1 and current().client is client


def test_an_object_that_was_used_in_a_job_of_another_size_says_so():
    named = JobHosts(Hosts(MemoryClient.hub(2)[0]))
    assert named() is named()
    of_the_job = JobHosts()
    assert of_the_job().count == 1
    module._hosts = Hosts(MemoryClient.hub(2)[0])  # as start() leaves it
    with pytest.raises(HostError, match=r"had 1 process\(es\) at the first use of this object, and now has 2"):
        of_the_job()


def test_it_is_too_late_to_join_once_jax_was_used():
    jax.devices()
    config = DistributedConfig(coordinator_address="127.0.0.1:1", num_processes=2, process_id=1)
    with pytest.raises(ConfigError, match="process 1 of 2 has used JAX before .* Call start"):
        start(config)


@pytest.fixture
def four_chips(monkeypatch, tmp_path):
    """A machine with four v5p chips, as the system lists them, on which JAX came up on the CPU by itself."""
    from jax._src import hardware_utils

    function = tmp_path / "0000:00:05.0"  # of a chip's PCI functions JAX 0.12 counts the first alone
    function.mkdir()
    for name, number in {"vendor": "0x1ae0", "device": "0x0062"}.items():
        (function / name).write_text(number)
    monkeypatch.setattr(hardware_utils.glob, "glob", lambda pattern: [str(function / "vendor")] * 4)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


def test_a_cpu_beside_tpus_is_refused(four_chips):
    assert jax.default_backend() == "cpu"
    text = r"has 4 TPU chips, but JAX .* runs on its CPU\. Install .*'jax-lockstep\[tpu\]'.*JAX_PLATFORMS=cpu"
    with pytest.raises(ConfigError, match=text):
        start()


def test_a_cpu_beside_tpus_on_purpose_is_used(four_chips):
    jax.config.update("jax_platforms", "cpu")
    assert start().count == 1


def test_hosts_is_made_of_any_client():
    assert [Hosts(client).is_leader for client in MemoryClient.hub(3)] == [True, False, False]


def test_a_job_that_has_connected_is_not_ended_when_the_time_to_connect_is_over(monkeypatch):
    timers = []

    class Timer(threading.Timer):
        def start(self):
            timers.append(self)

    monkeypatch.setattr(module.threading, "Timer", Timer)
    with module._connecting(DistributedConfig(initialization_timeout_s=7), "the 2 processes", {}):
        (timer,) = timers
        assert (timer.interval, timer.daemon, timer.finished.is_set()) == (7, True, False)
    assert timer.finished.is_set()


def test_a_job_that_does_not_connect_ends_and_says_for_how_long_it_tried(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(module, "end_process", codes.append)
    monkeypatch.setattr(module.threading.Timer, "start", lambda timer: timer.function())
    with module._connecting(DistributedConfig(initialization_timeout_s=7), "the 2 processes", {}):
        assert (
            codes == [PEER_FAILED]
            and is_retried(codes[0])
            and "error: not all of the 2 processes connected within 7 s" in capsys.readouterr().err
        )


def test_a_process_that_does_not_connect_says_what_the_coordinator_does(monkeypatch, capsys):
    def ended(address):
        with module._connecting(DistributedConfig(), "the 2 processes", {}, address):
            return capsys.readouterr().err

    monkeypatch.setattr(module, "end_process", lambda _: None)
    monkeypatch.setattr(module.threading.Timer, "start", lambda timer: timer.function())
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert f"Process 0 does not answer at {address}: it is stopped" in ended(address)
    assert f"Nobody listens at {address}: process 0 has not started" in ended(address)
    assert "rocess 0" not in ended(None)


@pytest.mark.parametrize("number", [1, 0])
@pytest.mark.parametrize("given", [True, False])
def test_a_task_of_slurm_has_its_gpu_whether_slurm_or_the_user_has_numbered_the_processes(monkeypatch, given, number):
    passed = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: passed.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(module, "backend_is_running", lambda: False)
    monkeypatch.setattr(module, "cluster_address", lambda: None)
    for name, value in {"PROCID": "1", "LOCALID": "1", "NTASKS": "2", "TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    if given:  # the numbers of processes that were started inside a task are not Slurm's
        module._initialize(DistributedConfig(coordinator_address="127.0.0.1:9", num_processes=2, process_id=number))
    else:
        module._initialize_from_cluster(DistributedConfig())
    assert passed["local_device_ids"] == ([1] if number or not given else None)


@pytest.mark.parametrize("job", [{}, {"coordinator_address": "127.0.0.1:9", "num_processes": 2, "process_id": 1}])
def test_jax_waits_longer_for_connections_than_we_do(monkeypatch, job):
    """Its abort does not say what to do."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(module, "backend_is_running", lambda: False)
    monkeypatch.setattr(module, "cluster_address", lambda: None)
    config = DistributedConfig(initialization_timeout_s=70, heartbeat_timeout_s=9, **job)
    (module._initialize if job else module._initialize_from_cluster)(config)
    assert given["initialization_timeout"] > 70 + 10 and given["heartbeat_timeout_seconds"] == 9


LISTENING = """
import jax
import lockstep
from lockstep.hosts._client import service_address
lockstep.start()
print("GPUs", jax.config.values["jax_cuda_visible_devices"])
port = int(service_address().rpartition(":")[2])
for kind in ("tcp", "tcp6"):
    for line in list(open(f"/proc/self/net/{kind}"))[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            print("listens on", local.rpartition(":")[0])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="Linux alone lists its sockets there")
def test_the_service_of_a_cluster_that_jax_detects_listens_where_its_name_leads_alone():
    """Slurm's variables, which JAX detects: the coordinator is the first node of the list."""
    job = random.Random(os.getpid()).randrange(1 << 20)  # JAX makes the port of it
    environment = dict(os.environ, SLURM_JOB_ID=str(job), SLURM_STEP_NODELIST="localhost", SLURM_JOB_NUM_NODES="1")
    environment |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), "0") | {"SLURM_NTASKS": "1"}
    environment.pop("JAX_COORDINATOR_BIND_ADDRESS", None)
    environment |= {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run([sys.executable, "-c", LISTENING], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    listens = re.findall("listens on (.*)", done.stdout)
    assert listens and set(listens) <= loopback, done.stdout
    assert "GPUs all\n" in done.stdout, "JAX's own rule is the first GPU alone"


PROCESSES = [2, 0, 1]
"""The process of each task."""


def numbered(hosts):
    number_processes(hosts, PROCESSES[hosts.client.task], 3, 5.0)
    return hosts


def leader_broadcasts(hosts):
    numbered(hosts)
    got = hosts.broadcast("v", f"task {hosts.client.task}".encode() if hosts.is_leader else None)
    rows = hosts.gather("rows", f"task {hosts.client.task}".encode())
    hosts.barrier("end")
    return hosts.index, got, rows


def test_the_leader_is_process_0_of_jax_and_rows_come_in_the_order_of_its_processes():
    results = run_threads(leader_broadcasts, 3)
    assert [index for index, *_ in results] == PROCESSES
    assert [got for _, got, _ in results] == [b"task 1"] * 3
    assert [rows for *_, rows in results] == [None, [b"task 1", b"task 2", b"task 0"], None]


def differs(hosts):
    numbered(hosts)
    with pytest.raises(HostError) as caught:
        hosts.agree("x", {"value": str(hosts.index == 2)})
    return str(caught.value)


def test_errors_name_the_processes_of_jax():
    (text,) = set(run_threads(differs, 3))
    assert "processes 0, 1 (the majority): 'False'; process 2: 'True'" in text


def waits(hosts):
    numbered(hosts)
    if hosts.index == 0:
        return ""
    hosts.timeout_s = 0.2
    with pytest.raises(HostTimeoutError, match="Missing: process 0 ") as caught:
        hosts.barrier("x")
    return str(caught.value.__cause__)


def test_the_words_of_the_service_are_explained():
    last, nobody, middle = run_threads(waits, 3)
    assert nobody == "" and "without tasks [1]" in last
    assert (
        "(The service counts otherwise: its task 0 is process 2, task 1 is process 0, task 2 is process 1.)" in middle
    )


@pytest.mark.parametrize(
    ("indices", "counts", "text"),
    [
        (
            [0, 0, 0],
            [3, 3, 3],
            r"jax.process_index\(\) is \[0, 0, 0\] on the processes 0 to 2 of the coordination serv",
        ),
        ([0, 1, 3], [3, 3, 3], r"must be another number from 0 on each"),
        ([0, 1, 0], [3, 3, 1], r"connected 3 processes, but .*: 3 by processes 0, 1; 1 by process 2\. Such devices"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_on_every_process(indices, counts, text):
    def number(hosts):
        task = hosts.client.task
        with pytest.raises(HostError, match=text) as caught:
            number_processes(hosts, indices[task], counts[task], 5.0)
        assert caught.value.on_every_process
        return str(caught.value)

    assert len(set(run_threads(number, 3))) == 1


def test_numbers_are_taken_over_again_after_an_earlier_numbering():
    def twice(hosts):
        numbered(hosts)
        hosts.client.index = PROCESSES[hosts.client.task]  # as `current` does before `start`
        return numbered(hosts).index

    assert run_threads(twice, 3) == PROCESSES
