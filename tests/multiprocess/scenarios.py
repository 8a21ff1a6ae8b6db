"""How jobs start and end: what the processes of tests/multiprocess/test_hosts.py run.

python -m tests.multiprocess.scenarios [bare] NAME [ARGUMENT ...]     (bare: without run_main)
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jax.errors import JaxRuntimeError

from lockstep.errors import HostError, HostTimeoutError, PeerError
from lockstep.hosts import DistributedConfig, Hosts, Watchdog, closing_on_leader, current, liveness, run_main, start
from lockstep.hosts._client import service_address
from lockstep.hosts.peers import ANNOUNCEMENTS, GRACE_S, WAKE_UPS
from lockstep.report import BackgroundQueue

LISTENED_S = 6.0
"""Seconds in which every process has heard of the others once."""


def begin(initialization_timeout_s: str = "60") -> None:
    start(DistributedConfig(initialization_timeout_s=int(initialization_timeout_s)))


def fail(victim: str) -> None:
    """One process fails; the leader has a report that takes a moment, and one that hangs."""
    hosts = start(DistributedConfig(timeout_s=600))
    hosts.barrier("both")
    if hosts.is_leader:
        queue = BackgroundQueue("reports", size=9)
        queue.put("step 2 (3 rows)", lambda: (time.sleep(0.1), print("step 2 is written", flush=True)))
        queue.put("step 4 (3 rows)", lambda: time.sleep(600))
    if hosts.index == int(victim):
        raise ValueError("boom")
    try:
        hosts.barrier("never")
    except HostTimeoutError as error:
        raise AssertionError("should have been ended before") from error


def close() -> None:
    """All have the same error; the leader's tracker takes longer to close than a process that is told waits."""
    hosts = start(DistributedConfig(timeout_s=600))
    with closing_on_leader(hosts, lambda: (time.sleep(GRACE_S + 1), print("closed", flush=True))):
        hosts.agree("settings", {"learning rate": str(hosts.index)})


def die(victim: str) -> None:
    hosts = start(DistributedConfig(timeout_s=600))
    hosts.barrier("both")
    if hosts.index == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def vanish(victim: str, heartbeat_timeout_s: str) -> None:
    """One process is killed while the others wait for something that no collective tells them of."""
    hosts = start(DistributedConfig(timeout_s=600, heartbeat_timeout_s=int(heartbeat_timeout_s)))
    hosts.phase("waiting for a device")
    hosts.barrier("all")
    time.sleep(LISTENED_S)
    print("all hear each other", flush=True)
    if hosts.index == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def stop(victim: str, moment: str, heartbeat_timeout_s: str) -> None:
    """One process is stopped (SIGSTOP) as it joins the job, once it has joined, or between two steps of all.

    It is killed once the others have ended.
    """
    liveness.NEWS_S, liveness.QUIET_S, liveness.ANSWER_S, liveness.UNHEARD_S = 1.0, 3.0, 2.0, 8.0
    module = sys.modules["lockstep.hosts.start"]
    watch = module._watch
    pids: list[bytes] = []

    def join(hosts: Hosts) -> Callable[[], None]:
        own = (f"pid/{hosts.client.task}", b"%d" % os.getpid())
        if hosts.client.task == int(victim):
            hosts.client.set(*own)
            pids.extend(hosts.client.get(f"pid/{task}", 60) for task in range(hosts.client.count))
        else:  # its answer may come from a process that is stopped by then
            threading.Thread(target=hosts.client.set, args=own, daemon=True).start()
        stop_at("joining", hosts)
        return watch(hosts)

    def stop_at(place: str, hosts: Hosts) -> None:
        if (hosts.client.task, moment) == (int(victim), place):
            others = " || ".join(f"kill -0 {pid.decode()}" for task, pid in enumerate(pids) if task != int(victim))
            command = f"while {others}; do sleep 0.2; done; kill -KILL {os.getpid()}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True, stderr=subprocess.DEVNULL)
            os.kill(os.getpid(), signal.SIGSTOP)

    module._watch = join
    hosts = start(DistributedConfig(timeout_s=600, heartbeat_timeout_s=int(heartbeat_timeout_s)))
    stop_at("joined", hosts)
    total, x = sum_over_processes()
    for step in range(10**9):
        total(x).block_until_ready()
        if step == 10:
            stop_at("steps", hosts)


def sum_over_processes() -> tuple[Any, Any]:
    """A program with a collective of all processes, and what it takes."""
    import jax
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.ones(jax.device_count())
    return jax.jit(lambda x: x.sum()), jax.make_array_from_callback(values.shape, rows, lambda at: values[at])


def terminate(victim: str, where: str) -> None:
    hosts = start(DistributedConfig(timeout_s=600))
    hosts.barrier("both")
    if hosts.index == int(victim):
        hosts.phase(where)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if where == "waiting":
            hosts.barrier("nobody else comes")
    time.sleep(600)


def stuck() -> None:
    hosts = start(DistributedConfig(timeout_s=600))
    total, x = sum_over_processes()
    hosts.phase("launching decode" if hosts.is_leader else "reading a slow disk")
    hosts.barrier("both")
    if hosts.is_leader:
        with Watchdog(hosts, 2.0).watch("decode"):
            total(x).block_until_ready()
    else:
        time.sleep(600)


def alone_in_a_launch() -> None:
    """A launch fails on both, which go on; then one fails on one alone, as it is dispatched: the other waits in it."""
    from lockstep.hosts import watchdog as module

    module.LOOK_S = 0.2
    hosts = start(DistributedConfig(timeout_s=600))
    watchdog = Watchdog(hosts, 600.0)

    def launch(work: Callable[[], object]) -> None:
        with hosts.launch_on_all("generate"):
            hosts.ledger.record("decode", "d")
            with watchdog.watch("decode"):
                work()

    def fail() -> None:
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while allocating 7 bytes")

    with contextlib.suppress(PeerError):
        launch(fail)
    launch(lambda: time.sleep(1))
    print("both went on", flush=True)
    launch(fail if hosts.index == 1 else lambda: time.sleep(600))


def adopt() -> None:
    import jax

    jax.distributed.initialize(
        os.environ["LOCKSTEP_COORDINATOR_ADDRESS"],
        int(os.environ["LOCKSTEP_NUM_PROCESSES"]),
        int(os.environ["LOCKSTEP_PROCESS_ID"]),
    )
    jax.devices()
    hosts = current()
    assert hosts.count == 2
    hosts.barrier("before start")
    assert start() is hosts
    hosts.barrier("after start")


def attacked() -> None:
    """Somebody looks for the service at another address, and posts that a process that there is not has ended well."""
    begin()
    hosts = current()
    address = service_address() or ""
    if hosts.index == 1:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), 5).close()
            print("THE SERVICE LISTENS ON OTHER ADDRESSES", flush=True)
        hosts.client.set(f"{ANNOUNCEMENTS}/9", json.dumps(["done \x1b[2J\x1b]0;title\x07", 0, 9]).encode())
        for task in range(hosts.count):
            hosts.client.set(f"{WAKE_UPS}/{task}", b"")
    time.sleep(60)


def ask() -> None:
    """Leave while threads ask the coordination service one thing after another."""
    client = start().client

    def work() -> None:
        with contextlib.suppress(HostError):
            while True:
                client.get_dir("lockstep/nothing")

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()


if __name__ == "__main__":
    scenario, *values = sys.argv[1:]
    if scenario == "bare":
        globals()[values[0]](*values[1:])
    else:
        run_main(lambda: globals()[scenario](*values))
