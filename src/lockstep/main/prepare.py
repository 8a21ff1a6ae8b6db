"""The commands that prepare a run: ``lockstep plan``, which compiles it for a TPU slice, and ``lockstep doctor``."""

import argparse
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax

from lockstep.config_fields import option_path
from lockstep.configuration import decode_config
from lockstep.doctor import DoctorConfig, examine, read_needs
from lockstep.errors import ConfigError, check_output
from lockstep.files import write_file
from lockstep.hosts import DistributedConfig
from lockstep.main.arguments import CONFIG_PATH, pairs, parse_arguments, read_values
from lockstep.main.commands import Arguments, Command, planned_commands
from lockstep.plan import (
    MeshCost,
    Plan,
    RematCost,
    as_json,
    make_plan,
    mesh_costs,
    place_of,
    print_meshes,
    print_plan,
    print_remat,
    remat_costs,
)
from lockstep.printable import show_log, write_to_stdout
from lockstep.terminal import Console
from lockstep.xla import CompileCache, CompileProgress, default_directory, topology


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command itself, for ``--help``."""
    group = parser.add_argument_group("what is planned")
    group.add_argument(
        "--topology", metavar="NAME", help="the slice (v4-N, v5p-N, v5litepod-N, v6e-N, tpu7x-N); required"
    )
    group.add_argument(
        "--command", choices=list(planned_commands()), help="whose configuration it is, where that is not clear"
    )
    group.add_argument(
        "--model", metavar="NAME", help="shape to plan with: a directory with a config.json, or a well-known checkpoint"
    )
    how = parser.add_argument_group("how it is shown and predicted")
    how.add_argument("--json", type=option_path, metavar="PATH", help="write all numbers there, - for standard output")
    how.add_argument(
        "--calibration",
        type=option_path,
        metavar="FILE",
        help="measured numbers of the chip, to predict seconds in place of published ones",
    )
    how.add_argument(
        "--meshes",
        choices=["all"],
        help="what trainer.mesh_shape auto and host_local would exchange and take, side by side",
    )
    how.add_argument(
        "--remat",
        choices=["all"],
        help="what each rematerialisation policy would cost (model.gradient_checkpointing), a line each",
    )
    how.add_argument(
        "--write_bandwidth", metavar="X", default="1", help="GB/s at which a host writes a checkpoint (default: 1)"
    )
    how.add_argument(
        "--dollars_per_chip_hour", metavar="X", help="what a chip costs, to tell what the run is expected to cost"
    )
    how.add_argument(
        "--cache_dir",
        type=option_path,
        metavar="DIR",
        default=default_directory(),
        help=f"where the compiler's results are kept, none for nowhere (default: {default_directory()})".replace(
            "%", "%%"
        ),
    )


def run_plan(arguments: Sequence[str]) -> int:
    """Plan as the command line says; 0 if the configuration fits, else 1."""
    own, rest = Arguments("plan", add_plan_options).parse_known_args(list(arguments))
    if own.topology is None:
        raise ConfigError("--topology is missing: name the slice to plan for, such as --topology v5p-64.")
    if own.json not in (None, STDOUT):
        check_output("--json", own.json)
    asked = dict(pairs(rest))
    # On a TPU host, its devices are left alone.
    jax.config.update("jax_platforms", "cpu")
    # A program that is only compiled cannot be read back from JAX's own cache.
    jax.config.update("jax_enable_compilation_cache", False)
    slice_ = topology(own.topology)
    bandwidth = 1e9 * _positive("--write_bandwidth", own.write_bandwidth, "a number of GB/s", "0.5")
    rate = own.dollars_per_chip_hour
    if rate is not None:
        rate = _positive("--dollars_per_chip_hour", rate, "a number of dollars", "4.2")
    command, config = read_plan(own.command, rest)
    progress = CompileProgress()
    cache = CompileCache(own.topology, None if own.cache_dir == Path("none") else own.cache_dir, progress)
    workload = command.workload(config, own.model)
    calibration = None if own.calibration is None else str(own.calibration)
    for option in ("remat", "meshes"):
        if getattr(own, option) and workload.training is None:
            raise ConfigError(f"--{option} all is about a train step, and {command.name} has none. Remove it.")
    with progress.live():
        plan = make_plan(workload, slice_, cache, calibration)
        costs = remat_costs(workload, slice_, cache, plan.memory) if own.remat and plan.mesh_shape else []
        meshes = mesh_costs(workload, slice_, cache, calibration) if own.meshes else []
    path = option_path(asked[CONFIG_PATH]) if CONFIG_PATH in asked else None
    places = [
        dataclasses.replace(infeasibility, place=place_of(path, infeasibility.key, list(asked)))
        for infeasibility in plan.infeasibilities
    ]
    plan = dataclasses.replace(plan, infeasibilities=places, write_bandwidth=bandwidth, dollars_per_chip_hour=rate)
    _show(plan, own.json, costs, meshes)
    return 0 if plan.fits else 1


STDOUT: Final = Path("-")


def _show(plan: Plan, json_path: Path | None, costs: list[RematCost], meshes: list[MeshCost]) -> None:
    if json_path is not None:
        values = as_json(plan)
        if costs:
            values["remat"] = [dataclasses.asdict(cost) for cost in costs]
        if meshes:
            values["meshes"] = [{**dataclasses.asdict(cost), "step_s": cost.step_s} for cost in meshes]
        text = json.dumps(values, indent=2) + "\n"
        if json_path == STDOUT:
            sys.stdout.write(text)
            return
        write_file(json_path, text)
    console = Console(markup=True, width=None if sys.stdout.isatty() else 120)

    def show() -> None:
        print_plan(plan, console)
        if costs:
            print_remat(costs, console)
        if meshes:
            print_meshes(meshes, console)

    write_to_stdout(show)


def read_plan(name: str | None, rest: Sequence[str]) -> tuple[Command, Any]:
    """The configuration, by the command of this name, or by the one that can read all of its keys."""
    commands = planned_commands()
    if name is not None:
        return commands[name], parse_arguments(commands[name].config(), rest)
    parsed: dict[str, Any] = {}
    wrong: dict[str, ConfigError] = {}
    for command_name, command in commands.items():
        try:
            parsed[command_name] = parse_arguments(command.config(), rest)
        except ConfigError as error:
            wrong[command_name] = error
    if len(parsed) == 1:
        ((only, config),) = parsed.items()
        return commands[only], config
    if parsed:
        first = next(iter(parsed))
        raise ConfigError(f"the configuration could be of {' or '.join(parsed)}. Say which: --command {first}.")
    # The command whose keys it fits best explains best what is wrong.
    values = read_values(rest)
    nearest = max(commands.values(), key=lambda command: _score(command, values))
    raise ConfigError(f"as a configuration of {nearest.name}: {wrong[nearest.name]}")


def _score(command: Command, values: dict[str, Any]) -> int:
    known = {field.name for field in dataclasses.fields(command.config())}
    return sum(1 if key in known else -1 for key in values)


def _positive(option: str, text: str, quantity: str, example: str) -> float:
    """The value of an option that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} is {text!r}; it must be {quantity} above 0, such as {example}.")
    return value


SWITCHES: Final = ("self-test", "self_test")  # the options that may stand without a value


def run_doctor(arguments: Sequence[str]) -> int:
    """Examine as the command line says; 1 where something needs a fix, else 0."""
    own, rest = split_doctor(arguments)
    config = parse_arguments(DoctorConfig, own)
    values = read_values(rest)
    needs = read_needs(config, values)
    distributed = decode_config(DistributedConfig, needs.distributed, "trainer.distributed")
    distributed = dataclasses.replace(
        distributed, timeout_s=config.timeout_s, initialization_timeout_s=max(1, round(config.timeout_s))
    )
    show_log(logging.WARNING)
    return examine(config, needs, distributed, Console(file=sys.stdout))


def split_doctor(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command itself, and those of the run's configuration."""
    names = {field.name for field in dataclasses.fields(DoctorConfig)}
    own: list[str] = []
    rest: list[str] = []
    todo = list(arguments)
    while todo:
        flag = todo.pop(0)
        name, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} was not expected. See lockstep doctor --help.")
        if not equals and name in SWITCHES and (not todo or todo[0].startswith("--")):
            value = "true"
        elif not equals:
            if not todo or todo[0].startswith("--"):
                raise ConfigError(f"argument --{name} has no value. See lockstep doctor --help.")
            value = todo.pop(0)
        name = "self_test" if name in SWITCHES else name
        if name == "buckets" and not value.startswith("["):  # one of them, or several with commas
            value = f"[{value}]"
        (own if name in names else rest).append(f"--{name}={value}")
    return own, rest
