"""What the benchmarks share: workers on threads and in processes, and the file of the results.

Every worker of a benchmark is started here: one that dies ends the benchmark with an error, whoever else measured.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.run_facts import ROOT, run_facts

_PREFIX = "figures "


def report(figures: Any) -> None:
    """Tell `run_workers` what this process has measured.

    Args:
        figures: JSON values.
    """
    print(_PREFIX + json.dumps(figures), flush=True)


def figures_in(output: str) -> list[Any]:
    """Return what processes have told by `report`, in the order in which they did."""
    return [json.loads(line.removeprefix(_PREFIX)) for line in output.splitlines() if line.startswith(_PREFIX)]


def run_on_threads[Task, Result](work: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
    """Do work for each task on a thread of its own; the first failure ends the process, as others may wait for it.

    Returns:
        What each task gave, in the order of the tasks.
    """
    results: dict[int, Result] = {}

    def run(number: int, task: Task) -> None:
        try:
            results[number] = work(task)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    threads = [threading.Thread(target=run, args=numbered) for numbered in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(threads))]


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command in the root of the repository, to its end.

    Args:
        command: The program and its arguments.
        environment: Environment variables beside those of this process.

    Returns:
        Its standard output.

    Raises:
        RuntimeError: It failed or was killed; the end of what it printed is in the text.
    """
    everything = {**os.environ, **(environment or {})}
    run = subprocess.run(command, cwd=ROOT, env=everything, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} ended with {run.returncode}:\n{run.stdout[-5000:]}\n{run.stderr[-5000:]}"
        )
    return run.stdout


def run_workers(
    module: str, *arguments: str, processes: int, devices: int, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Run a module in several processes on this machine, through the launcher.

    Args:
        module: The module's name, such as ``benchmarks.decode``.
        arguments: Its arguments.
        processes: The number of processes.
        devices: The number of CPU devices of each.
        environment: Environment variables beside those of this process.

    Returns:
        What was reported, in the order in which it was.

    Raises:
        RuntimeError: A process failed, or none reported anything; the end of what they printed is in the text.
    """
    command = [sys.executable, str(ROOT / "infra" / "launch.py"), "--backend", "local", "--prefix", "never"]
    command += ["--processes", str(processes), "--devices_per_process", str(devices), "--", "python", "-m", module]
    output = run_command([*command, *arguments], environment)
    figures = figures_in(output)
    if not figures:
        raise RuntimeError(f"{shlex.join([module, *arguments])}: no process reported a figure:\n{output[-5000:]}")
    return figures


def write_json(path: Path, rows: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write results whole or not at all, an object with the facts of the run as ``run``.

    Args:
        path: The file.
        rows: JSON values by name, which lie beside ``run``; others become ``rows``.

    Raises:
        ValueError: A value is named ``run``.
    """
    values = dict(rows) if isinstance(rows, Mapping) else {"rows": rows}
    if "run" in values:
        raise ValueError("the figures have a value named run, which is the name of the facts of the run. Rename it.")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"run": run_facts()} | values, indent=2) + "\n")
    temporary.replace(path)


def read_rows(path: Path) -> list[Any]:
    """Return rows that were written as a list, with the facts of the run or, before there were any, without.

    Args:
        path: The file.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    rows: list[Any] = found["rows"] if isinstance(found, dict) else found
    return rows
