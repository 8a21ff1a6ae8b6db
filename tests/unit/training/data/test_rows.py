"""Rows of a data set, and the order in which they are drawn."""

import gc
import json
import threading
import time

import numpy as np
import pytest

from lockstep.training import TokenizedRows
from lockstep.training.data import LmDataConfig, PreferenceDataConfig, records
from lockstep.training.data import rows as rows_module
from lockstep.training.data.rows import BucketOrder, RowOrder
from tests.tiny import tokenizer
from tests.unit.training.data.characters import Tokenizer, preference, write


def numbers(n, seed=0, shuffle=True):
    return TokenizedRows(columns={"n": np.arange(n)}, seed=seed, shuffle=shuffle)


def test_every_row_comes_once_per_epoch_over_batch_borders():
    rows = numbers(10)
    drawn = np.concatenate([rows.indices(step, 4) for step in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()


def test_order_depends_on_the_seed_alone_and_hosts_take_their_part():
    whole = numbers(100, seed=3).indices(7, 12)
    parts = [numbers(100, seed=3).batch(7, 12, slice(i, i + 4))["n"] for i in (0, 4, 8)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole.tolist() != numbers(100, seed=4).indices(7, 12).tolist()
    assert numbers(10, shuffle=False).indices(1, 4).tolist() == [4, 5, 6, 7]


def test_a_batch_larger_than_the_data():
    assert np.bincount(numbers(3).indices(0, 7)).tolist() in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


def test_digest_sees_values_and_order():
    assert numbers(5).digest() == numbers(5).digest()
    assert len({numbers(5).digest(), numbers(6).digest(), numbers(5, seed=1).digest()}) == 3


def make(*sizes, weights=None, seed=0, shuffle=True):
    return RowOrder(sizes=sizes, weights=weights or (1.0,) * len(sizes), seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("size", [10, rows_module.SMALL + 1], ids=["list", "computed"])  # grain alone loses a row there
def test_every_row_comes_once_per_epoch_in_another_order(size):
    first, second = ([row for _, row in make(size).rows(range(e * size, (e + 1) * size))] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second and first != list(range(size))
    other = [row for _, row in make(size, seed=1).rows(range(10))]
    assert first[:10] != other and second[:10] != other  # epochs and seeds do not overlap
    assert make(size).rows([3, 1]) == [(0, first[3]), (0, first[1])]


@pytest.mark.parametrize(
    "size",
    [
        rows_module.SMALL,
        2**16 + 1,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (200_000, 2**18, 10**6)),
        pytest.param(10**9, marks=pytest.mark.slow),
    ],
)
def test_rows_at_neighbouring_places_have_nothing_to_do_with_each_other(size):
    """For a uniform permutation each correlation is 1 / sqrt(count) of chance; six of them never come by chance."""
    count = min(size, 300_000)
    rows = np.array([row for _, row in make(size).rows(range(count))])
    for values in (rows / size, rows % 256 / 256):
        centred = (values - values.mean()) / values.std()
        found = [float(np.mean(centred[:-lag] * centred[lag:])) * count**0.5 for lag in range(1, 65)]
        assert max(map(abs, found)) < 6, found
        assert sum(each**2 for each in found) < 64 + 6 * (2 * 64) ** 0.5, found


def test_without_shuffle_the_order_is_that_of_the_files():
    assert make(3, shuffle=False).rows(range(7)) == [(0, n % 3) for n in range(7)]


def test_a_place_among_billions_needs_no_list():
    rows = [row for _, row in make(10**9, seed=7).rows(range(2000))]
    assert len(set(rows)) == 2000 and max(rows) < 10**9
    assert 0.45e9 < np.mean(rows) < 0.55e9


def test_sources_take_turns_by_weight_and_have_epochs_of_their_own():
    drawn = make(5, 100, weights=(3.0, 1.0)).rows(range(400))
    for start in range(0, 400, 40):
        assert sum(source == 0 for source, _ in drawn[start : start + 40]) == 30
    small = [row for source, row in drawn if source == 0]
    for start in range(0, 300, 5):
        assert sorted(small[start : start + 5]) == list(range(5))
    assert sorted(row for source, row in drawn if source == 1) == list(range(100))
    assert make(5, 100, weights=(3.0, 1.0)).rows(range(200, 300)) == drawn[200:300]


def buckets_of(*sizes, weights=None, seed=0, shuffle=True):
    return BucketOrder(sizes=sizes, weights=weights or (1.0,) * len(sizes), seed=seed, shuffle=shuffle)


def bucket_of(sizes, row):
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def batches(order, steps, batch_size):
    return [order.rows(step, batch_size, slice(0, batch_size)) for step in steps]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_has_rows_of_one_bucket_and_every_row_comes_once_per_epoch(shuffle):
    sizes = (8, 0, 24, 16)
    found = batches(buckets_of(sizes, shuffle=shuffle), range(12), 4)
    buckets = [{bucket_of(sizes, row) for _, row in batch} for batch in found]
    assert all(len(each) == 1 for each in buckets)
    turns = [each.pop() for each in buckets]
    assert [turns.count(bucket) for bucket in range(4)] == [2, 0, 6, 4]
    assert turns != sorted(turns)
    rows = [row for batch in found for _, row in batch]
    assert sorted(rows) == list(range(48))
    again = [row for batch in batches(buckets_of(sizes, shuffle=shuffle), range(12, 24), 4) for _, row in batch]
    assert sorted(again) == list(range(48)) and (again != rows) == shuffle
    assert buckets_of(sizes).buckets == (0, 2, 3)


def test_buckets_of_one_size_have_orders_of_their_own():
    first, second = (order.rows(range(100)) for _, order in buckets_of((100, 100))._in_bucket)
    assert sorted(first) == sorted(second) and sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_a_batch_is_a_function_of_the_step_and_hosts_take_their_part():
    sizes = (5, 11, 100)
    whole = batches(buckets_of(sizes), range(40), 8)
    assert batches(buckets_of(sizes), [31], 8) == [whole[31]]
    parts = [buckets_of(sizes).rows(31, 8, slice(start, start + 2)) for start in (0, 2, 4, 6)]
    assert [row for part in parts for row in part] == whole[31]
    assert batches(buckets_of(sizes, seed=1), range(40), 8) != whole


def test_sources_keep_their_weights_whatever_their_lengths():
    """The first source has short rows mostly, the second long ones; the first is to have three rows in four."""
    sizes = (90, 10), (20, 180)
    order = buckets_of(*sizes, weights=(3.0, 1.0))
    rows = [one for batch in batches(order, range(200), 8) for one in batch]
    drawn = [(source, bucket_of(sizes[source], row)) for source, row in rows]
    assert sum(source == 0 for source, _ in drawn) / len(drawn) == pytest.approx(0.75, abs=0.01)
    assert drawn.count((0, 0)) / len(drawn) == pytest.approx(0.75 * 0.9, abs=0.01)
    assert drawn.count((1, 1)) / len(drawn) == pytest.approx(0.25 * 0.9, abs=0.01)


def test_with_one_length_the_order_is_that_of_the_rows():
    rows = RowOrder(sizes=(5, 9), weights=(2.0, 1.0), seed=3, shuffle=True)
    order = buckets_of((5,), (9,), weights=(2.0, 1.0), seed=3)
    assert batches(order, [0, 7], 6) == [rows.rows(range(0, 6)), rows.rows(range(42, 48))]
    assert order.first(4) == [rows.rows(range(4))]


def test_the_beginning_of_the_order_tells_seeds_and_shares_apart():
    orders = [buckets_of((6, 6)), buckets_of((6, 6), seed=1), buckets_of((6, 6), shuffle=False), buckets_of((6, 3))]
    firsts = [repr(order.first(16)) for order in orders]
    assert len(set(firsts)) == 4 and firsts[0] == repr(buckets_of((6, 6)).first(16))


def test_a_batch_from_a_cache_is_a_function_of_the_step_and_hosts_take_their_part(tmp_path):
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
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 2000)  # several chunks, each with rows of several lengths
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
    with open("/proc/self/status", encoding="utf-8") as status:
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
        pytest.param(15_000, question, {"format": "prompt_completion"}, 30, marks=pytest.mark.slow),
        # Short rows, which are tokenised in half the time: 8 minutes of one core.
        pytest.param(10_000_000, digits, {"packing": False}, 120, marks=pytest.mark.nightly),
    ],
    ids=["15 thousand", "10 million"],
)
def test_memory_does_not_grow_with_the_rows(tmp_path, count, row, given, limit):
    """As lists of Python integers, 15,000 rows of 16 tokens take 30 MiB or more, 10 million of 9 more than 1 GiB."""
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
    monkeypatch.setattr(rows_module, "ORDER_VERSION", 1)
    now, at = rows.digest(), "(version {} of the order)".format
    assert before.removesuffix(at(2)) == now.removesuffix(at(1)) and before != now
