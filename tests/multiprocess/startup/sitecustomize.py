"""Imported by Python itself at the start of each process of a job: process 0 alone compiles programs of several.

By itself each process compiles every program: on CPU the key of one that several processes run has the process in it,
and JAX writes what process 0 compiled alone. Here the key is the same for all, and the others read from the cache what
process 0 has compiled or found there. What the compiler is given is not changed.
"""

import contextlib
import importlib.abc
import importlib.util
import sys
from typing import Any

COMPILED_S = 15.0
"""Seconds that a process waits for process 0 to have a program, before it compiles by itself."""


class CompilerHook(importlib.abc.MetaPathFinder):
    """Changes JAX's compiler module when it is imported, so that a process without JAX does not import it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Returns the module's own spec, whose loader then calls `compile_on_one_process`."""
        if name != "jax._src.compiler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            compile_on_one_process(module)

        vars(spec.loader)["exec_module"] = execute_and_change
        return spec


def compile_on_one_process(compiler: Any) -> None:
    """Replace the functions of JAX's compiler module that read and write its persistent cache."""
    from jax._src import cache_key, distributed

    cache_key._hash_accelerator_config = cache_key._hash_devices
    job, read, write = distributed.global_state, compiler._cache_read, compiler._cache_write
    compile_and_write = compiler._compile_and_write_cache
    known: set[str] = set()

    def is_shared(devices: Any) -> bool:
        return job.client is not None and len({device.process_index for device in devices}) > 1

    def tell(key: str) -> None:
        if job.client is not None and job.process_id == 0 and key not in known:
            known.add(key)
            job.client.key_value_set_bytes(f"compiled/{key}", b"")

    def read_when_told(module: str, key: str, options: Any, backend: Any, devices: Any, *others: Any) -> Any:
        if is_shared(devices) and job.process_id != 0 and key not in known:
            known.add(key)
            with contextlib.suppress(Exception):  # process 0 does not compile it, or has left
                job.client.blocking_key_value_get_bytes(f"compiled/{key}", int(COMPILED_S * 1e3))
        found = read(module, key, options, backend, devices, *others)
        if found[0] is not None:
            tell(key)
        return found

    def write_and_tell(key: str, *others: Any) -> None:
        write(key, *others)
        tell(key)

    def compile_write_and_read(
        backend: Any, computation: Any, devices: Any, options: Any, callbacks: Any, module: str, key: str
    ) -> Any:
        compiled = compile_and_write(backend, computation, devices, options, callbacks, module, key)
        # The text of a program that was read from the cache can differ, and hosts compare it.
        found = read(module, key, options, backend, devices, callbacks)[0] if is_shared(devices) else None
        return compiled if found is None else found

    compiler._cache_read, compiler._cache_write = read_when_told, write_and_tell
    compiler._compile_and_write_cache = compile_write_and_read


sys.meta_path.insert(0, CompilerHook())
