"""What checksums cost a checkpoint's save: the same arrays without any, with ours and with crc32c, in turns.

A save is that of one process to a local disk, from the copy of the arrays to the file that makes it a checkpoint.
Seconds are compared within a turn, whose saves come one after another in an order that changes from turn to turn, so
what else the machine does falls on all of them: those of the processors, of all threads and of the system for them, and
those of the wall. The goal is 5 % of a save at most.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.workers import write_json
from lockstep.training.checkpoints import writers
from lockstep.training.checkpoints.arrays import handler, merge_arrays, write_arrays
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory, CheckpointMetadata, named_arrays, shape_texts

SPEC = writers._spec
GOAL = 0.05
LAYERS, WIDTH = 12, 378  # with both moments of Adam 252 MB, as a model of 21 million weights has


def state_of(scale: float) -> dict[str, jax.Array]:
    """Weights and both moments of Adam as a Llama has them, in float32, which hardly compresses."""
    rng = np.random.default_rng(0)
    hidden = int(4 * WIDTH * scale)
    width = int(WIDTH * scale)
    shapes = {"embed": (256, width), "norms": (LAYERS, width), "up": (LAYERS, hidden, width)}
    shapes |= {"down": (LAYERS, width, hidden), **{f"attention_{name}": (LAYERS, width, width) for name in "qkvo"}}
    return {
        f"{kind}.{name}": jax.device_put(rng.standard_normal(shape, np.float32))
        for kind in ("model", "mu", "nu")
        for name, shape in shapes.items()
    }


def save(directory: CheckpointDirectory, arrays: dict[str, jax.Array], *, checked: bool) -> None:
    """Save as the checkpointer does, or as it would without any checksum."""
    name = directory.begin(1)
    wait = write_arrays(directory.of(1) / name, arrays)
    wait()
    if checked:
        digest = merge_arrays(directory.of(1) / name)
    else:
        handler().finalize(directory.of(1) / name)
    facts: dict[str, Any] = {
        "facts": {},
        "config": {},
        "hooks": {},
        "hooks_called": True,
        "shapes": shape_texts(arrays),
    }
    directory.commit(
        CheckpointMetadata(step=1, loss=1.0, arrays=name, tree_digest=digest if checked else None, **facts)
    )


def timed(call: Callable[[], None]) -> dict[str, float]:
    """Seconds of the processors, of all threads and the system for them, and of the wall."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu}


CODECS: dict[str, list[dict[str, Any]]] = {
    "none": [{"name": "zstd", "configuration": {"level": 1}}],
    "ours": [{"name": "zstd", "configuration": {"level": 1, "checksum": True}}],
    "crc32c": [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
}
"""What follows the codec ``bytes``; the nodes of the tree of chunks have a checksum in each."""


def spec_with(codecs: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """What the handler tells tensorstore, with other codecs."""

    def spec(*args: Any) -> dict[str, Any]:
        found = SPEC(*args)
        found["metadata"]["codecs"][1:] = codecs
        return found

    return spec


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    parser.add_argument("--turns", type=int, default=60, help="how many (60)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the model's width (1: 252 MB)")
    parser.add_argument("--directory", type=Path, help="where to save; the place of temporary files")
    options = parser.parse_args()
    arrays = named_arrays(state_of(options.scale))
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in CODECS}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        directory = CheckpointDirectory(folder)
        for turn in range(-1, options.turns):  # the first is not counted
            order = list(CODECS)[turn % 3 :] + list(CODECS)[: turn % 3]
            for name in order[:: 1 if turn % 2 else -1]:
                writers._spec = spec_with(CODECS[name])
                found = timed(lambda: save(directory, arrays, checked=name != "none"))  # noqa: B023, called at once
                written[name] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
                shutil.rmtree(os.fspath(directory.of(1)))
                os.sync()  # what one save has left to the disk does not fall on the next
                if turn >= 0:
                    seconds[name].append(found)
    rows: dict[str, Any] = {"turns": options.turns, "array_bytes": sum(array.nbytes for array in arrays.values())}
    for name in CODECS:
        rows[f"{name}_written_bytes"] = written[name]
        for kind in ("cpu", "wall"):
            mine, bare = (np.array([each[kind] for each in seconds[which]]) for which in (name, "none"))
            rows[f"{name}_{kind}_s"] = statistics.median(mine)
            if name != "none":
                rows[f"{name}_{kind}_s_more"] = statistics.median(mine - bare)
                rows[f"{name}_{kind}_ratio"] = statistics.median(mine / bare)
                rows[f"{name}_{kind}_ratio_quartiles"] = np.quantile(mine / bare, [0.25, 0.75]).tolist()
                rows[f"{name}_{kind}_ratio_of_the_fastest"] = mine.min() / bare.min()
        if name != "none":
            rows[f"{name}_cpu_s_more_over_wall"] = rows[f"{name}_cpu_s_more"] / rows["none_wall_s"]
    for name, value in rows.items():
        goal = f"  (goal: at most {GOAL})" if name == "ours_cpu_s_more_over_wall" else ""
        print(f"{name:34} {value}{goal}")
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
