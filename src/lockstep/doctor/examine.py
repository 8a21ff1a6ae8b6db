"""All checks in order; every process of the job makes the same calls."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from scipy.optimize import nnls

from lockstep.doctor import speed
from lockstep.doctor.finding import BackgroundCheck, Finding, Findings, attempt, failed, merge, wait_for_all
from lockstep.doctor.job import (
    JoinResult,
    check_devices,
    check_memory,
    check_mesh,
    join,
    judge_coordination,
    measure_coordination,
)
from lockstep.doctor.machine import (
    check_disks,
    check_host,
    check_huge_pages,
    check_variables,
    check_versions,
    compare,
    compare_clocks,
    host_facts,
    judge_cache,
    run_paths,
)
from lockstep.doctor.needs import NETWORK, DoctorConfig, RunNeeds, begin_checks, check_wandb
from lockstep.doctor.self_test import self_test
from lockstep.doctor.speed import CollectiveTime, DeviceSpeed, time_loops
from lockstep.errors import ConfigError, HostError, check_output
from lockstep.files import write_file
from lockstep.hosts import DistributedConfig, Hosts, end_process, try_leader_only
from lockstep.json_text import from_peer
from lockstep.placement import make_mesh
from lockstep.placement.device import chip_of, save_calibration


def fit_link(measured: Sequence[CollectiveTime]) -> dict[str, float]:
    """Find the numbers of `Link` that collectives over it tell.

    Latency and hop are those, not below 0, whose prediction of the smallest collectives has the least squared error.
    The bandwidth is that at which a device receives what the largest all-gather brings, in the time that it takes
    longer than the smallest, or in all of its time where noise hides the difference: over several groups, the least.

    Returns:
        ``latency_s``, ``bandwidth`` and, where groups differ in it, ``hop_s``; nothing where nothing was measured.
    """
    if not measured:
        return {}
    smallest = min(collective.size for collective in measured)
    small = [collective for collective in measured if collective.size == smallest]
    unknowns = np.array([[1.0, collective.turns] for collective in small])
    (latency, hop), _ = nnls(unknowns, np.array([collective.seconds for collective in small]))
    numbers = {"latency_s": float(latency)}
    if len({collective.turns for collective in small}) > 1:
        numbers["hop_s"] = float(hop)
    rates = []
    for group in dict.fromkeys(collective.group.name for collective in measured):
        gathers = [
            collective for collective in measured if collective.group.name == group and collective.kind == "all-gather"
        ]
        first, last = (pick(gathers, key=lambda collective: collective.size) for pick in (min, max))
        longer = last.seconds - first.seconds
        rates.append((last.received - first.received) / longer if longer > 0 else last.received / last.seconds)
    return numbers | {"bandwidth": min(rates)}


def calibration(
    speeds: Sequence[DeviceSpeed], measured: Sequence[CollectiveTime], device: jax.Device, processes: int, number: int
) -> dict[str, Any]:
    """The content of a calibration file; the same on every process."""
    chip = chip_of(device)
    one_network = chip.network == chip.link  # as on a TPU slice
    of_slice = [sample for sample in measured if sample.group.slices == 1]
    inside = [sample for sample in of_slice if one_network or not sample.group.crosses_hosts]
    across = [sample for sample in of_slice if not one_network and sample.group.crosses_hosts]
    between = fit_link([sample for sample in measured if sample.group.slices == sample.group.members])
    runtime = " ".join(str(device.client.platform_version).split())
    day = time.strftime("%Y-%m-%d", time.gmtime())
    values: dict[str, Any] = {
        "chip": chip.name,
        "measured": f"{day} by lockstep doctor on {number} of {device.device_kind} in {processes} processes, jax "
        f"{importlib.metadata.version('jax')}, {runtime[:120]}",
        "bandwidth": statistics.median(sample.bandwidth for sample in speeds),
        "flops": statistics.median(sample.flops for sample in speeds),
    }
    if "bandwidth" in between:
        values["dcn"] = between["bandwidth"]
    links = {"link": fit_link(inside), "network": fit_link(across)}
    return values | {name: fitted for name, fitted in links.items() if fitted}


def examine(config: DoctorConfig, needs: RunNeeds, distributed: DistributedConfig, console: Console) -> int:
    """Do all checks, on every process, and show them; 1 where something needs a fix, else 0, the same on all."""
    reaching = begin_checks(needs)
    machine = [
        *attempt("versions", check_versions),
        *attempt("host", check_host),
        *attempt("disk", lambda: check_disks(run_paths(needs.log_dir))),
        *attempt("variables", check_variables),
        *attempt("huge pages", check_huge_pages),
    ]
    joined = join(distributed)
    if joined.hosts is None:
        return _without_job(config, machine, joined, reaching, console)
    return _Examination(config, needs, joined.hosts, console).run(machine, joined.finding, reaching)


def _without_job(
    config: DoctorConfig,
    machine: Sequence[Finding],
    joined: JoinResult,
    reaching: Sequence[BackgroundCheck],
    console: Console,
) -> int:
    """The report of a process that is in no job: what it knows by itself."""
    report = Findings(console, config.json)
    report.add("machine", merge([machine]))
    report.add("job", merge([[joined.finding]]))
    report.add("reach", merge([wait_for_all(reaching, config.reach_s)]))
    code = report.finish()
    if joined.waiting:
        end_process(code)
    return code


class _Examination:
    """The checks of a process that is in a job, alone or with others."""

    def __init__(self, config: DoctorConfig, needs: RunNeeds, hosts: Hosts, console: Console) -> None:
        self._config, self._needs, self._hosts = config, needs, hosts
        self._report = Findings(console, config.json) if hosts.is_leader else Findings()

    def run(self, machine: Sequence[Finding], joined: Finding, reaching: list[BackgroundCheck]) -> int:
        with self._hosts.run_on_all("the report's file"):
            self._report.begin()
            if self._config.calibrate is not None:
                check_output("calibrate", self._config.calibrate)
        if self._hosts.is_leader and self._needs.wandb is not None:
            settings, seconds = self._needs.wandb, self._config.reach_s
            reaching = [*reaching, BackgroundCheck("W&B", lambda: check_wandb(settings, seconds), NETWORK)]
        self._add("machine", machine)
        self._job(joined)
        self._add("reach", wait_for_all(reaching, self._config.reach_s))
        if self._config.measure:
            self._on_all("speed", self._speed)
        if self._config.self_test:
            self._self_test()
        code = self._hosts.broadcast_from_leader("doctor/end", lambda: str(self._report.finish()).encode())
        return from_peer(code, Literal[0, 1], "the leader's exit code")  # type: ignore[arg-type]

    def _add(self, title: str, findings: Iterable[Finding], values: Mapping[str, Any] | None = None) -> None:
        """Have the leader show what all processes found."""
        own = json.dumps([dataclasses.asdict(finding) for finding in findings])
        everyone = self._hosts.gather(f"doctor/{title}", own.encode())
        if everyone is not None:
            merged = merge(
                [from_peer(findings_of_process, list[Finding], "what a host found") for findings_of_process in everyone]
            )
            try_leader_only("the report", lambda: self._report.add(title, merged, values), "the checks go on")

    def _on_all(self, title: str, work: Callable[[], tuple[list[Finding], dict[str, Any]]]) -> None:
        """Do what all processes do together; where it fails on all, that is what was found."""
        try:
            findings, values = work()
        except HostError as error:
            if not error.on_every_process:
                raise
            findings, values = [failed(title, error)], {}
        self._add(title, findings, values)

    def _job(self, joined: Finding) -> None:
        """The processes and their devices, compared."""
        findings = [joined, *attempt("devices", check_devices), *attempt("device memory", check_memory)]
        findings += attempt("mesh", lambda: check_mesh(self._needs.mesh_shape))
        with self._hosts.run_on_all("doctor: facts of the hosts") as phase:
            phase.share(host_facts(self._needs.config_digest))
        facts = phase.shared
        findings += attempt("hosts", lambda: compare(facts))
        self._hosts.barrier("doctor/clocks")
        now = time.time()
        with self._hosts.run_on_all("doctor: clocks") as phase:
            phase.share(now)
        times = phase.shared
        if self._hosts.count > 1:
            findings += attempt("clocks", lambda: compare_clocks(times))
        findings += self._cache()
        latency = measure_coordination(self._hosts)
        with self._hosts.run_on_all("doctor: latencies") as phase:
            phase.share(latency)
        latencies = phase.shared
        findings += attempt("coordination", lambda: judge_coordination(latencies))
        self._add("job", findings, {"facts": facts, "coordination": latencies})

    def _cache(self) -> list[Finding]:
        """Whether all processes keep compiled programs in one place."""
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
        mark = f"lockstep-doctor-{secrets.token_hex(8)}"

        def make() -> bytes:
            if cache and "://" not in cache:
                Path(cache).mkdir(parents=True, exist_ok=True)
                write_file(Path(cache) / mark, b"")
            return mark.encode()

        mark = self._hosts.broadcast_from_leader("doctor: a file in the cache of programs", make).decode()
        with self._hosts.run_on_all("doctor: the cache of programs") as phase:
            phase.share("://" in cache or not cache or (Path(cache) / Path(mark).name).exists())
        if self._hosts.is_leader and cache and "://" not in cache:
            (Path(cache) / mark).unlink(missing_ok=True)
        return attempt("compilation cache", lambda: judge_cache(cache, phase.shared))

    def _speed(self) -> tuple[list[Finding], dict[str, Any]]:
        """The speeds of the devices and of the links between them, written as a calibration where that is asked."""
        hosts, mesh = self._hosts, _mesh(self._needs.mesh_shape)
        devices = list(mesh.devices.flat)
        sizes = speed.sizes_for(devices[0].platform)
        seconds = time_loops(hosts, "device speed", lambda: speed.build_loops(hosts, devices, sizes))
        speeds = speed.speeds(seconds, devices, sizes)
        findings = attempt("device speed", lambda: speed.judge_speeds(speeds, devices))
        kinds: list[speed.Kind] = ["all-reduce"]
        if self._config.calibrate is not None:
            kinds.append("all-gather")
        loops = [
            (group, kind, size)
            for group in speed.find_groups(mesh)
            for kind in kinds
            for size in speed.collective_sizes(devices[0].platform)
        ]
        measured: list[speed.CollectiveTime] = []
        if loops:
            seconds = time_loops(hosts, "collectives", lambda: speed.build_collectives(hosts, loops))
            slowest = [max(sample[i] for sample in seconds) for i in range(len(loops))]
            measured = [
                speed.CollectiveTime(group=group, kind=kind, size=size, seconds=taken)
                for (group, kind, size), taken in zip(loops, slowest, strict=True)
            ]
            findings += attempt("all-reduce", lambda: speed.judge_collectives(measured))
        if self._config.calibrate is not None:
            findings.append(self._calibrate(self._config.calibrate, speeds, measured, devices))
        values = {
            "speeds": [dataclasses.asdict(sample) for sample in speeds],
            "collectives": [
                {"group": sample.group.name, "devices": sample.group.members, "kind": sample.kind, "bytes": sample.size,
                 "seconds": sample.seconds}
                for sample in measured
            ],
        }  # fmt: skip
        return findings, values

    def _calibrate(
        self,
        path: str,
        speeds: Sequence[speed.DeviceSpeed],
        measured: Sequence[speed.CollectiveTime],
        devices: Sequence[jax.Device],
    ) -> Finding:
        """Write the same calibration file on every process: a run needs it on every host."""

        def work() -> bytes:
            return json.dumps(calibration(speeds, measured, devices[0], self._hosts.count, len(devices))).encode()

        content = from_peer(
            self._hosts.broadcast_from_leader("doctor/calibration", work), dict[str, Any], "the calibration"
        )
        with self._hosts.run_on_all("writing the calibration"):
            save_calibration(path, **content)
        parts: list[str] = [name for name in ("bandwidth", "flops", "dcn") if name in content]
        parts += [f"{name} ({', '.join(content[name])})" for name in ("link", "network") if name in content]
        return Finding.ok("calibration", f"{path}, on every process, has {', '.join(parts)} of {content['chip']}")

    def _self_test(self) -> None:
        """Train on the mesh of the run; with several processes, on the one with data parallel hosts too."""
        shapes = [self._needs.mesh_shape]
        if self._hosts.count > 1 and "host_local" not in shapes:
            shapes.append("host_local")
        deadline = time.monotonic() + self._config.self_test_s
        for number, shape in enumerate(shapes):
            test = functools.partial(self_test, self._hosts, shape, deadline, all_layouts=number == 0)
            self._on_all(f"self-test {shape}", test)


def _mesh(mesh_shape: str) -> Mesh:
    """The mesh of the run, or one that always works where that does not."""
    try:
        return make_mesh(mesh_shape)
    except ConfigError:
        return make_mesh()
