"""Rows of the token cache and places of its order, against grain's own; docs/adr/0018-token-cache.md has the decision.

Run it as ``.venv/bin/python -m benchmarks.token_cache``.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.sizes import sized
from benchmarks.workers import write_json
from lockstep.training.data.examples import TokenSequence
from lockstep.training.data.row_records import RowWriter
from lockstep.training.data.rows import RowOrder
from lockstep.training.data.token_cache import RowReader, cache_file

BATCH = 64


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def write_ours(directory: str, rows: int, tokens: np.ndarray) -> RowReader:
    fs = fsspec.filesystem("file")
    with cache_file(fs, f"{directory}/0.rows") as data, cache_file(fs, f"{directory}/0.index") as index:
        writer = RowWriter(data, index)
        for _ in range(rows):
            writer.write([TokenSequence(1, tokens)])
        writer.finish()
    return RowReader(fs, lambda chunk, suffix: f"{directory}/{chunk}.{suffix}", [rows])


def write_array_record(path: str, options: str, rows: int, tokens: np.ndarray) -> None:
    writer = ArrayRecordWriter(path, options)
    for _ in range(rows):
        writer.write(tokens.tobytes())
    writer.close()


def read_us(read: Callable[[list[int]], Sequence[object]], order: np.ndarray) -> float:
    """Microseconds per row, the second time over all of them."""

    def work() -> None:
        for start in range(0, len(order), BATCH):
            for row in read(order[start : start + BATCH].tolist()):
                np.frombuffer(row, np.int32)[-1] if isinstance(row, bytes) else row[-1]

    work()
    return seconds(work) / len(order) * 1e6


def place_us(sizes: tuple[int, ...], weights: tuple[float, ...], places: int) -> float:
    order = RowOrder(sizes=sizes, weights=weights, seed=0, shuffle=True)
    order.rows([0])
    return seconds(lambda: order.rows(range(10**9, 10**9 + places))) / places * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=sized(50_000, 200))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--json", type=Path, help="the file to write the numbers to")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    tokens, order = rng.integers(0, 32_000, options.length).astype(np.int32), rng.permutation(options.rows)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        readers: list[RowReader] = []
        found["write_s/ours"] = seconds(lambda: readers.append(write_ours(directory, options.rows, tokens)))
        found["mib/ours"] = os.path.getsize(f"{directory}/0.rows") / 2**20
        found["read_us/ours"] = read_us(readers[0].read, order)
        for name, settings in (("uncompressed", "group_size:1,uncompressed"), ("compressed", "group_size:1")):
            path = f"{directory}/{name}.array_record"
            found[f"write_s/array_record {name}"] = seconds(
                lambda path=path, settings=settings: write_array_record(path, settings, options.rows, tokens)
            )
            found[f"mib/array_record {name}"] = os.path.getsize(path) / 2**20
            source = grain.sources.ArrayRecordDataSource([path])
            found[f"read_us/array_record {name}"] = read_us(source.__getitems__, order)
    found["place_us/10 million rows"] = place_us((10_000_000,), (1.0,), 20_000)
    found["place_us/mixture of 10 million and 50 rows"] = place_us((10_000_000, 50), (0.7, 0.3), 5_000)
    shuffle = grain.experimental.index_shuffle
    found["place_us/grain's shuffle of 3 rows"] = (
        seconds(lambda: [shuffle(n % 3, max_index=2, seed=n, rounds=4) for n in range(100)]) * 1e4
    )
    for name, value in found.items():
        print(f"{name:45} {value:10.2f}")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
