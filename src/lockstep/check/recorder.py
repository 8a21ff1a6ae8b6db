"""The record of one process, as lines of a file: its launches and whatever can tell two processes apart."""

import collections
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.check import _jax, findings
from lockstep.files import private
from lockstep.printable import error_text

QUIET_S = 3.0  # seconds without a launch after which a process notes where it is
SAMPLES = 50  # first launches of a program from a stack at which the live arrays are looked at
SAMPLE_S = 0.02  # seconds at least between two looks after those
IN_FLIGHT = 8
"""Launches on several devices after which the last one is waited for: XLA's CPU runtime deadlocks by itself when some
dozens with collectives are in flight. Waited for at once: a result may be donated to the next launch."""
IDLE = 0.02  # the part of a core below which a process computes nothing
MOST_KINDS = 64  # kinds of live arrays that one line names
_DONATED = re.compile(r"tf\.aliasing_output|jax\.buffer_donor")


class Recorder:
    """Writes a file of JSON lines, each complete as soon as it is written: the process may be killed at any time."""

    def __init__(self, file: Path, index: int) -> None:
        self._file = private(file, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY)
        self._pid = os.getpid()
        self._index = index
        self._lock = threading.RLock()
        self._at = threading.local()
        self._stacks: dict[findings.Key, int] = {}
        self._texts: dict[Any, str] = {}
        self._programs: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._made: dict[int, int] = {}
        self._donated: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._keys: dict[str, int] = {}
        self._samples: collections.Counter[tuple[int, int]] = collections.Counter()
        self._sampled = 0.0
        self._in_flight = 0
        self._results: list[weakref.ref[Any]] = []
        self._last = time.monotonic()
        self._ended = False

    # ---- what _jax tells

    def compiled(self, key: Any, text: str) -> None:
        """A program was compiled: remember its text until it is launched."""
        with self._lock:
            self._texts[key] = text

    def starts(self, program: Any, arguments: Sequence[Any]) -> None:
        """Note a launch, before it can hang."""
        with self._lock:
            facts = self._facts(program, arguments)
        shared = facts["processes"] != [self._index]
        values = list(_host_values(program, arguments)) if shared else []  # may wait for a device: without the lock
        with self._lock:
            where = self._at.stack = self._stack(findings.here())
            line: dict[str, Any] = {"is": "launch", "program": facts["id"], "stack": where, "thread": _thread()}
            if values:
                line["values"] = values
            if used := self._used_again(arguments):
                line["donated"] = used
            for position in facts["donated"]:
                if position < len(arguments) and isinstance(arguments[position], jax.Array):
                    self._donated[id(arguments[position])] = (weakref.ref(arguments[position]), where)
            line |= self._sample(facts["id"], where)
            self._write(line)

    def succeeds(self, program: Any, results: Sequence[Any]) -> None:
        """Note where its results were made, and hold the thread back where too many launches are in flight."""
        with self._lock:
            self._made |= dict.fromkeys(map(id, results), self._at.stack)
            if self._programs[id(program)][1]["devices"] < 2:
                return
            self._results = [weakref.ref(result) for result in results]
            self._in_flight = (self._in_flight + 1) % IN_FLIGHT
            held_back = self._in_flight == 0
        if held_back:
            _jax.wait_for(results)

    def put(self, array: jax.Array) -> None:
        """Note the values of an array that was put together for devices of several processes."""
        if array.is_fully_addressable:
            return
        digests = ((str(shard.index), _digest(shard.data)) for shard in array.addressable_shards)
        pieces = {place: digest for place, digest in digests if digest is not None}
        text = f"{array.dtype}{list(array.shape)}"
        with self._lock:
            self._write({"is": "put", "array": text, "pieces": pieces, "stack": self._stack(findings.here())})

    def compares(self, tree: Any) -> None:
        """Note a value that every process compares with that of all others."""
        size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
        with self._lock:
            self._write({"is": "comparison", "bytes": size, "stack": self._stack(findings.here())})

    def key_added(self, key: str) -> None:
        """Note a key of the coordination service, and where it is set."""
        with self._lock:
            self._keys.pop(key, None)
            self._keys[key] = self._stack(findings.here())

    def key_deleted(self, key: str) -> None:
        """Forget a key, or a directory of keys."""
        with self._lock:
            for known_key in [
                known_key for known_key in self._keys if known_key == key or known_key.startswith(key.rstrip("/") + "/")
            ]:
                del self._keys[known_key]

    # ---- the life of the process

    def error(self, value: BaseException, trace: Any) -> None:
        """Note an error that ends the process."""
        key = tuple(
            (code.co_filename, line, code.co_qualname)
            for code, line in reversed([(frame.f_code, line) for frame, line in traceback.walk_tb(trace)])
            if not findings.is_hidden(code.co_filename)
        )
        with self._lock:
            self._write({"is": "error", "text": error_text(value), "stack": self._stack(key)})

    def end(self) -> None:
        """Note that the script is done."""
        with self._lock:
            if not self._ended and os.getpid() == self._pid:
                self._ended = True
                self._write({"is": "end"})

    def watch(self) -> None:
        """From a thread of its own, note where each thread is whenever nothing was launched for a while."""
        threading.Thread(target=self._watch, name="lockstep-check", daemon=True).start()

    def _watch(self) -> None:
        noted: tuple[float, bool] | None = None
        last = computed = 0.0
        while True:
            time.sleep(0.5)
            if last != self._last:
                last, computed = self._last, time.process_time()
            quiet = time.monotonic() - last
            waiting = self._unfinished() and time.process_time() - computed < IDLE * quiet
            if quiet < QUIET_S or noted == (last, waiting):
                continue
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            main = threading.main_thread().ident
            with self._lock:
                for ident, frame in sys._current_frames().items():
                    key = findings.walk(frame)
                    if ident == main or (key and names.get(ident) != "lockstep-check" and findings.is_own(key[0][0])):
                        line = {"is": "where", "thread": names.get(ident, ""), "stack": self._stack(key)}
                        self._put_line(line | {"compiling": _compiles(frame), "waiting": waiting})
            noted = (last, waiting)

    # ---- inside

    def _facts(self, program: Any, arguments: Sequence[Any]) -> dict[str, Any]:
        known = self._programs.get(id(program))
        if known is not None:
            return known[1]
        text = self._texts.pop(_jax.key_of(program), "")
        devices = _jax.all_devices(program)
        local = [jax.local_devices().index(device) for device in _jax.local_devices(program)]
        facts = {
            "is": "program",
            "id": len(self._programs),
            "name": _jax.name_of(program),
            "operation": _jax.is_operation(_jax.name_of(program)),
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
            "processes": sorted({device.process_index for device in devices}),
            "devices": len(devices),
            "local": sorted(local),
            "arguments": [_describe(argument) for argument in arguments],
            "donated": _donated(text),
        }
        self._programs[id(program)] = (program, facts)
        self._write({**facts, "text": text})
        return facts

    def _stack(self, key: findings.Key) -> int:
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._stacks)
            self._put_line({"is": "stack", "id": number, "frames": key})
        return number

    def _used_again(self, arguments: Sequence[Any]) -> list[tuple[int, int]]:
        """The positions of arguments that were donated before, each with the stack of that launch."""
        positions = []
        for position, argument in enumerate(arguments):
            reference, where = self._donated.get(id(argument), (None, -1))
            array = None if reference is None else reference()
            if array is not None and array is argument and array.is_deleted():
                positions.append((position, where))
        return positions

    def _unfinished(self) -> bool:
        """Whether the devices have not run the last launch, as far as its results are still there."""
        arrays = [result() for result in self._results]
        return any(array is not None and not array.is_deleted() and not array.is_ready() for array in arrays)

    def _sample(self, program: int, where: int) -> dict[str, Any]:
        now = time.monotonic()
        self._samples[program, where] += 1
        if self._samples[program, where] > SAMPLES and now - self._sampled < SAMPLE_S:
            return {}
        arrays = jax.live_arrays()
        kinds = collections.Counter(
            (f"{array.dtype}{list(array.shape)}", self._made.get(id(array), -1)) for array in arrays
        )
        known = {id(array) for array in arrays}
        self._made = {number: where for number, where in self._made.items() if number in known}
        self._sampled = time.monotonic()
        most = [[kind, where, count] for (kind, where), count in kinds.most_common(MOST_KINDS)]
        counts = collections.Counter(self._keys.values())
        examples = {where: key for key, where in self._keys.items()}
        setters = [[examples[where], where, count] for where, count in counts.most_common(MOST_KINDS)]
        return {"live": len(arrays), "kinds": most, "keys": len(self._keys), "setters": setters}

    def _write(self, line: dict[str, Any]) -> None:
        self._last = time.monotonic()
        self._put_line(line)

    def _put_line(self, line: dict[str, Any]) -> None:
        if os.getpid() == self._pid:
            os.write(self._file, json.dumps(line, default=str).encode() + b"\n")


def _thread() -> str:
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else thread.name


def _describe(value: Any) -> str:
    sharding = getattr(value, "sharding", None)
    spec = getattr(sharding, "spec", None)
    text = f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', ()))}"
    return text if spec is None else f"{text} {spec}"


def _donated(text: str) -> list[int]:
    """The positions of the arguments that a program may overwrite, from its StableHLO."""
    head = text.partition("@main(")[2].partition("\n")[0]
    positions = []
    for part in re.split(r"(?=%arg\d+: )", head):
        match = re.match(r"%arg(\d+): ", part)
        if match and _DONATED.search(part):
            positions.append(int(match[1]))
    return positions


def _host_values(program: Any, arguments: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Arguments that each process has its own copy of and JAX takes to be equal: position, digest, a short text."""
    for position, (value, sharding) in enumerate(zip(arguments, _jax.in_shardings(program), strict=False)):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            continue
        if getattr(sharding, "is_fully_replicated", False) and (digest := _digest(value)) is not None:
            yield position, digest, _short(value)


def _digest(value: Any) -> str | None:
    """A digest of a value that is in this process; None where NumPy cannot have it."""
    try:
        content = np.ascontiguousarray(np.asarray(value))
    except (TypeError, RuntimeError):  # keys of a random generator; a deleted array, whose launch fails next
        return None
    return hashlib.blake2b(content.tobytes(), digest_size=8).hexdigest()


def _short(value: Any) -> str:
    array = np.asarray(value)
    return str(array) if array.size <= 4 else f"{array.dtype}{list(array.shape)}"


def _compiles(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("backend_compile_and_load", "compile_or_get_cached", "backend_compile"):
            return True
        frame = frame.f_back
    return False
