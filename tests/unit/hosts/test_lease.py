"""The lease of a directory: given back, waited for, taken over, refused; on a disk and in a bucket."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import lease as leases
from lockstep.hosts.lease import LEASE, Holder, Lease
from tests.clock import until

ELSEWHERE = Holder(token="other", host="far", machine="far 1 2", pid=1, started="3", renewed=0.0)


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path)
        return
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.makedirs("/leased", exist_ok=True)
    yield "memory://leased"
    filesystem.store.clear()


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch):
    monkeypatch.setattr(leases, "SETTLE_S", 0.05)


def path_of(place):
    return f"{place}/{LEASE}"


def put(place, holder):
    """Write it as a whole: who reads meanwhile finds the one before."""
    fs, path = fsspec.core.url_to_fs(path_of(place))
    with fs.open(f"{path}.new", "w") as file:
        json.dump(dataclasses.asdict(holder), file)
    fs.mv(f"{path}.new", path)


def holder_of(place):
    with fsspec.open(path_of(place), "r") as file:
        return json.load(file)


def test_it_is_there_until_it_is_given_back(place):
    lease = Lease(place, renew_s=0.02)
    lease.take()
    first = holder_of(place)
    assert first["pid"] == os.getpid() and abs(first["renewed"] - time.time()) < 60
    until(lambda: holder_of(place)["renewed"] > first["renewed"])
    lease.give_back()
    with pytest.raises(FileNotFoundError):
        holder_of(place)


def test_one_that_another_machine_renews_is_refused(place):
    """A thread renews it as a job elsewhere does."""
    other = Lease(place, renew_s=0.02)
    other.take()
    other._write = lambda: put(place, dataclasses.replace(ELSEWHERE, token=other._token, renewed=time.time()))
    other._write()
    with pytest.raises(ConfigError, match="process 1 on far has its lease, renewed .* s ago, so another job writes"):
        Lease(place, renew_s=0.1, old_s=60).take()
    other.give_back()


@pytest.mark.parametrize("age_s", [0.0, 1000.0])
def test_one_that_nobody_renews_is_taken_over_when_it_is_old(place, age_s):
    put(place, dataclasses.replace(ELSEWHERE, renewed=time.time() - age_s))
    lease = Lease(place, renew_s=0.1, old_s=0.4)
    begin = time.monotonic()
    lease.take()
    assert time.monotonic() - begin >= (0.0 if age_s else 0.35)
    assert holder_of(place)["pid"] == os.getpid()
    lease.give_back()


def test_one_that_is_given_back_meanwhile_is_taken(place):
    put(place, dataclasses.replace(ELSEWHERE, renewed=time.time()))
    filesystem, path = fsspec.core.url_to_fs(path_of(place))
    threading.Timer(0.3, filesystem.rm_file, [path]).start()
    lease = Lease(place, renew_s=0.1, old_s=600)
    lease.take()
    assert holder_of(place)["pid"] == os.getpid()
    lease.give_back()


def test_one_that_another_job_took_since_this_one_looked_is_refused(place):
    """As of two that start at once, of which one is slow: the other has the lease before the first writes it."""

    class Slow(Lease):
        def _read(self):
            holder = super()._read()
            if "token" not in vars(other_lease):
                other_lease.token = True
                other_lease.take()
            return holder

    other_lease = Lease(place, renew_s=600)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* another job writes there now"):
        Slow(place).take()
    assert holder_of(place)["token"] == other_lease._token
    other_lease.give_back()


OTHER = """
import sys, time
from lockstep.hosts.lease import Lease
Lease(sys.argv[1], renew_s=0.05).take()
print("taken", flush=True)
time.sleep(600)
"""


def test_that_of_a_process_of_this_machine_is_refused_while_it_lives_and_taken_over_once_it_is_killed(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on .* another job writes there now"):
            Lease(tmp_path, renew_s=0.1).take()
    finally:
        other.kill()
    # Not waited for: a process that has ended and is still listed is dead all the same.
    until(lambda: leases._start_of(other.pid) == "")
    lease = Lease(tmp_path, old_s=600)
    lease.take()
    assert holder_of(str(tmp_path))["pid"] == os.getpid()
    lease.give_back()
    other.wait()


def test_what_is_no_lease_is_replaced(place):
    with fsspec.open(path_of(place), "w") as file:
        file.write("half of")
    lease = Lease(place)
    lease.take()
    assert holder_of(place)["token"]
    lease.give_back()


def test_a_process_that_has_the_number_of_a_dead_one_is_another(place):
    mine = Lease(place)
    mine.take()
    alive = Holder(**holder_of(place))
    mine.give_back()
    assert not dataclasses.replace(alive, pid=os.getppid(), started=leases._start_of(os.getppid())).is_dead
    assert dataclasses.replace(alive, pid=os.getppid(), started="1").is_dead
