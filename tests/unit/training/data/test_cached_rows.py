"""Batches from a cache: a pure function of the step, with bounded memory."""

import gc
import json
import threading
import time

import numpy as np
import pytest

from lockstep.training import LmDataConfig, PreferenceDataConfig
from lockstep.training.data import cached_rows, sources
from tests.tiny import tokenizer
from tests.unit.training.data.characters import Tokenizer, preference, write


def test_a_batch_is_a_function_of_the_step_and_hosts_take_their_part(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"text": chr(65 + n)} for n in range(20)])
    rows = LmDataConfig(train_urls=urls, packing=False, max_seq_len=3).load(Tokenizer(), 16, 3)
    drawn = np.concatenate([rows.batch(step, 8, slice(0, 8))["tokens"][:, 1] for step in range(5)])
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == list(range(65, 85))
    parts = [rows.batch(3, 8, slice(start, start + 2))["tokens"][:, 1] for start in (0, 2, 4, 6)]
    assert np.concatenate(parts).tolist() == drawn[24:32].tolist()


def test_pairs_in_buckets_are_those_without_in_batches_of_one_length_each(tmp_path, monkeypatch, caplog):
    """The question, the role of the answer and their ends take 5 tokens; the longer answer of a pair decides."""
    sizes = np.random.default_rng(0).permutation([1] * 24 + [3] * 8 + [6] * 8)
    pairs = [preference(chr(65 + n) * size, chr(65 + n)) for n, size in enumerate(sizes)]
    urls = write(tmp_path / "x.jsonl", pairs)
    monkeypatch.setattr(sources, "MIN_CHUNK_BYTES", 2000)  # several chunks, each with rows of several lengths
    caplog.set_level("INFO")
    plain = PreferenceDataConfig(train_urls=urls, max_seq_len=11).load(Tokenizer(), 16, 3)
    bucketed = PreferenceDataConfig(train_urls=urls, max_seq_len=11, length_buckets=(4, 6, 8)).load(Tokenizer(), 16, 3)
    (cache,) = bucketed.caches
    assert len(cache.metadata.chunk_rows) > 4 * 2
    # No pair fits into rows of 4.
    assert (cache.metadata.bucket_rows, bucketed.lengths) == ((0, 24, 8, 8), (6, 8, 11))
    assert len(bucketed) == len(plain) == 40 and bucketed.digest() != plain.digest()

    def drawn(rows, steps):
        found = []
        for step in steps:
            batch = rows.batch(step, 8, slice(0, 8))
            length = batch["tokens"].shape[-1]
            longest = batch["loss_mask"].any(axis=(0, 1)).nonzero()[0].max() + 1
            assert (longest == length) == (rows is bucketed) or rows is plain, "no row is longer than its bucket needs"
            found += [tuple(map(tuple, np.pad(one, ((0, 0), (0, 11 - length))))) for one in batch["tokens"]]
        return found

    assert sorted(drawn(bucketed, range(5))) == sorted(drawn(plain, range(5)))
    assert sorted(drawn(bucketed, range(5, 10))) == sorted(drawn(plain, range(5)))
    shapes = [bucketed.batch(step, 8, slice(0, 2))["tokens"].shape for step in range(5)]
    assert sorted(shapes) == [(2, 2, 6)] * 3 + [(2, 2, 8), (2, 2, 11)]
    tokens = int(sum(5 + size + 6 for size in sizes))
    before, after = 1 - tokens / (2 * 40 * 11), 1 - tokens / (2 * (24 * 6 + 8 * 8 + 8 * 11))
    assert f"24 rows of 6, 8 rows of 8, 8 rows of 11, {after:.1%} of it padding ({before:.1%} without" in caplog.text


def anonymous_mib():
    """Resident memory of this process that is not a file's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def growth_mib(work):
    """How far the resident memory goes up while some work is done."""
    gc.collect()
    before, most, done = anonymous_mib(), [0.0], threading.Event()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], anonymous_mib())
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(most[0], anonymous_mib()) - before


def question(number):
    return {"prompt": f"What is {number} plus 7?", "completion": " thirty-six"}


def digits(number):
    return {"text": f"{number} six"}


def generate(path, row, count):
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps(row(number)) + "\n")
    return (str(path),)


@pytest.mark.parametrize(
    ("count", "row", "given", "limit"),
    [
        (30_000, question, {"format": "prompt_completion"}, 60),
        # Short rows, which are tokenised in half the time: 8 minutes of one core.
        pytest.param(10_000_000, digits, {"packing": False}, 120, marks=pytest.mark.nightly),
    ],
    ids=["30 thousand", "10 million"],
)
def test_memory_does_not_grow_with_the_rows(tmp_path, count, row, given, limit):
    """As lists of Python integers, 30,000 rows of 16 tokens take 60 MiB or more, 10 million of 9 more than 1 GiB."""
    words = tokenizer()
    config = LmDataConfig(
        train_urls=generate(tmp_path / "x.jsonl", row, count),
        cache_dir=str(tmp_path / "cache"),
        max_seq_len=32,
        **given,
    )
    warm = LmDataConfig(**{**vars(config), "train_urls": generate(tmp_path / "warm.jsonl", row, 2000)})
    warm.load(words, 32, 0).batch(0, 64, slice(0, 64))

    def work():
        rows = config.load(words, 32, 0)
        assert len(rows) == count
        for step in range(0, count // 64, count // 64 // 100):
            rows.batch(step, 64, slice(0, 64))

    growth = growth_mib(work)
    print(f"{count:,} rows: {growth:.1f} MiB more")
    assert growth < limit


def test_another_version_of_the_order_is_named_by_the_digest(tmp_path, monkeypatch):
    urls = write(tmp_path / "x.jsonl", [preference("a", "b")] * 4)
    rows = PreferenceDataConfig(train_urls=urls, max_seq_len=11).load(Tokenizer(), 16, 3)
    before = rows.digest()
    monkeypatch.setattr(cached_rows, "ORDER_VERSION", 1)
    now, at = rows.digest(), "(version {} of the order)".format
    assert before.removesuffix(at(2)) == now.removesuffix(at(1)) and before != now
