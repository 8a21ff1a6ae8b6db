"""The hooks that see the launches of a process. The only file of the check that touches ``jax._src`` (ADR 26)."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import jax
from jax._src import array, compiler, config, distributed, pjit, stages, xla_bridge
from jax._src.interpreters import mlir, partial_eval, pxla
from jax.experimental import multihost_utils
from jaxlib import _jax

from lockstep.errors import ConfigError

NEEDED = (
    (pjit, ("_get_fastpath_data", "_cpp_pjit_cache_fun_only", "_cpp_pjit_cache_explicit_attributes")),
    (pxla, ("ExecuteReplicated",)),
    (stages, ("Compiled",)),
    (compiler, ("compile_or_get_cached",)),
    (config, ("no_execution",)),
    (mlir, ("module_to_string",)),
    (array, ("make_array_from_callback", "make_array_from_single_device_arrays")),
    (xla_bridge, ("backends",)),
    (distributed, ("global_state", "initialize")),
    (multihost_utils, ("assert_equal",)),
    (_jax, ("DistributedRuntimeClient",)),
)
"""The names that are replaced or read; private ones, which another version of JAX may not have."""


CACHE_MISS_LOGGER = partial_eval.__name__  # the logger that `jax_explain_cache_misses` writes to


class LaunchWatcher(Protocol):
    """Is told of each launch."""

    def starts(self, program: Any, arguments: Sequence[Any]) -> None:
        """A program is about to be launched with these arguments, those that it does not use left out."""

    def succeeds(self, program: Any, results: Sequence[Any]) -> None:
        """It was handed to the devices, which may not have run it yet."""


def check_version() -> None:
    """Raise where this version of JAX lacks what the check replaces."""
    missing = [f"{owner.__name__}.{name}" for owner, names in NEEDED for name in names if not hasattr(owner, name)]
    if missing:
        raise ConfigError(
            f"lockstep check does not know jax {jax.__version__}, which has no {', '.join(missing)}. Use jax 0.11 "
            "or 0.12."
        )


@contextlib.contextmanager
def watch_launches(watcher: LaunchWatcher) -> Iterator[None]:
    """Tell a watcher of every launch inside: jitted, compiled ahead of time, eager, those of other libraries."""
    check_version()
    call = pxla.ExecuteReplicated.__call__

    def watched(self: Any, *arguments: Any) -> Any:
        if config.no_execution.value:  # it is refused
            return call(self, *arguments)
        kept = [argument for index, argument in enumerate(arguments) if index in self.kept_var_idx]
        watcher.starts(self, kept)
        results = call(self, *arguments)
        watcher.succeeds(self, results)
        return results

    def slow_call(self: Any, *arguments: Any, **named: Any) -> Any:
        # Without the C++ dispatcher, which a program compiled ahead of time keeps from its first call on.
        return stages.Compiled.call(self._params, *arguments, **named)[0]

    # What was called before must come through Python again.
    for cache in (pjit._cpp_pjit_cache_fun_only, pjit._cpp_pjit_cache_explicit_attributes):
        cache.clear()
    with (
        mock.patch.object(pjit, "_get_fastpath_data", lambda *_, **__: None),
        mock.patch.object(stages.Compiled, "__call__", slow_call),
        mock.patch.object(pxla.ExecuteReplicated, "__call__", watched),
    ):
        yield


def name_of(program: Any) -> str:
    """The name of a program."""
    return str(program.name)


def is_operation(name: str) -> bool:
    """Whether a program has the name of an operation of JAX: ``jit(convert_element_type)``."""
    operation = name.removeprefix("jit(").removesuffix(")")
    return hasattr(jax.lax, operation) or hasattr(jax.numpy, operation)


def local_devices(program: Any) -> Sequence[jax.Device]:
    """The devices of this process that a program runs on."""
    devices: Sequence[jax.Device] = program._local_devices
    return devices


def all_devices(program: Any) -> set[jax.Device]:
    """All devices that a program runs on, those of other processes too."""
    devices = set(local_devices(program))
    for sharding in (*in_shardings(program), *getattr(program.out_handler, "out_shardings", ())):
        devices |= getattr(sharding, "device_set", set())
    return devices


def in_shardings(program: Any) -> Sequence[Any]:
    """The shardings of a program's arguments, in their order."""
    shardings: Sequence[Any] = program.in_handler.in_shardings
    return shardings


def see_compiled(see: Callable[[Any, str], None]) -> None:
    """From now on, call ``see(key, text)`` for each program that is compiled, or read from the compilation cache."""
    compile_program = compiler.compile_or_get_cached

    @functools.wraps(compile_program)
    def compile_and_report(backend: Any, computation: Any, *options: Any, **named: Any) -> Any:
        text = mlir.module_to_string(computation, enable_debug_info=False)  # the compiler may consume the module
        executable = compile_program(backend, computation, *options, **named)
        see(executable, text)
        return executable

    compiler.compile_or_get_cached = compile_and_report


def wait_for(results: Sequence[Any]) -> None:
    """Wait until a launch is over, well or with an error, which whoever uses its results gets."""
    with contextlib.suppress(Exception):
        jax.block_until_ready(results)


def key_of(program: Any) -> Any:
    """The executable that stands for a compiled program."""
    return program.xla_executable


def see_arrays(see: Callable[[Any], None]) -> None:
    """From now on, call ``see(array)`` for each array that is put together from what this process has."""

    def seen(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def make_and_report(*arguments: Any, **named: Any) -> Any:
            made = make(*arguments, **named)
            see(made)
            return made

        return make_and_report

    for name in ("make_array_from_callback", "make_array_from_single_device_arrays"):
        made = seen(getattr(array, name))
        setattr(array, name, made)
        setattr(jax, name, made)


def see_comparisons(see: Callable[[Any], None]) -> None:
    """From now on, call ``see(tree)`` for each value that all processes compare because one puts it on all devices."""
    compare = multihost_utils.assert_equal

    @functools.wraps(compare)
    def tell_and_compare(tree: Any, fail_message: str = "") -> None:
        if "device_put" in fail_message:
            see(tree)
        compare(tree, fail_message)

    setattr(multihost_utils, "assert_equal", tell_and_compare)  # noqa: B010


def see_keys(added: Callable[[str], None], deleted: Callable[[str], None]) -> None:
    """From now on, tell of the keys of the coordination service that this process sets and deletes."""
    client: Any = _jax.DistributedRuntimeClient

    def setting(store: Callable[..., Any]) -> Callable[..., Any]:
        def store_and_report(self: Any, key: str, *values: Any, **named: Any) -> Any:
            added(key)
            return store(self, key, *values, **named)

        return store_and_report

    def delete_and_report(self: Any, key: str, *values: Any, **named: Any) -> Any:
        deleted(key)
        return delete(self, key, *values, **named)

    delete = client.key_value_delete
    client.key_value_delete = delete_and_report
    for name in ("key_value_set", "key_value_set_bytes"):
        setattr(client, name, setting(getattr(client, name)))


def join_job(address: str, count: int, index: int, joined: Callable[[], None]) -> None:
    """Have this process join a job, when the script says so or else when it first asks for devices.

    What the script says of addresses and numbers is replaced.
    """
    initialize, backends = distributed.initialize, xla_bridge.backends
    replaced = ("coordinator_address", "num_processes", "process_id", "local_device_ids", "cluster_detection_method")

    @functools.wraps(initialize)
    def initialize_here(*arguments: Any, **named: Any) -> None:
        settings = {name: value for name, value in named.items() if name not in replaced}
        initialize(address, count, index, **settings)
        joined()

    def backends_of_job() -> Any:
        if distributed.global_state.client is None and not xla_bridge._backends:
            initialize_here()
        return backends()

    distributed.initialize = jax.distributed.initialize = initialize_here
    xla_bridge.backends = backends_of_job
