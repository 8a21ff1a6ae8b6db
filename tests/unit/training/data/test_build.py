"""Hosts that build a cache together, are killed, are slow, fail, or have disks of their own."""

import io
import logging
import os
import time

import pytest

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient, own_work
from lockstep.terminal import Console
from lockstep.training.data import LmDataConfig, build, records
from lockstep.training.data.build import BuildProgress
from tests.multiprocess.harness import run_threads
from tests.unit.training.data.characters import Tokenizer, columns, write


class Counting(Tokenizer):
    """Counts the batches that it is given; fails at one, or takes its time."""

    def __init__(self, fail_at=None, delay_s=0.0, stall_s=0.0):
        self.calls, self.fail_at, self.delay_s, self.stall_s = 0, fail_at, delay_s, stall_s

    def __call__(self, texts, **options):
        self.calls += 1
        time.sleep(self.delay_s or (self.stall_s if self.calls == 2 else 0.0))
        if self.calls == self.fail_at:
            raise RuntimeError("the disk is gone")
        return super().__call__(texts, **options)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """600 records in 14 chunks, each of them one call of the tokenizer."""
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 900)
    urls = write(tmp_path / "x.jsonl", [{"text": f"row {n}"} for n in range(600)])
    return LmDataConfig(train_urls=urls, packing=False, max_seq_len=12, cache_dir=str(tmp_path / "cache"))


def load(hosts, config, tokenizers):
    rows = config.load(tokenizers[hosts.index], 16, 0, hosts)
    return rows.digest(), columns(rows)["tokens"].tolist()


def with_cache(config, path):
    return LmDataConfig(**{**vars(config), "cache_dir": str(path)})


def test_hosts_build_a_share_each_and_find_it_finished_later(config, tmp_path):
    alone = Counting()
    oracle = load_alone(with_cache(config, tmp_path / "other"), alone)
    tokenizers = [Counting() for _ in range(3)]
    found = run_threads(load, 3, config, tokenizers)
    assert found == [oracle] * 3
    assert alone.calls == 14 and [one.calls for one in tokenizers] == [5, 5, 4]
    assert not list((tmp_path / "cache").glob("probe-*")) and not list((tmp_path / "cache").glob("*/*.tmp"))
    again = [Counting() for _ in range(2)]
    assert run_threads(load, 2, config, again) == [oracle] * 2
    assert [one.calls for one in again] == [0, 0]


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"lines": [1], "n_bad": 0}'])
def test_a_part_of_a_cache_that_is_none_names_its_directory(config, tmp_path, text):
    """Hosts share the directory: what is in it may be of somebody else."""
    load_alone(config, Tokenizer())
    directory = next(path for path in (tmp_path / "cache").iterdir() if path.name != "locks")
    next(directory.glob("chunk-*.json")).write_text(text)
    (directory / "metadata.json").unlink()
    with pytest.raises(ConfigError, match="Remove this directory: the data is then tokenised again"):
        load_alone(config, Tokenizer())


def load_alone(config, tokenizer):
    rows = config.load(tokenizer, 16, 0)
    return rows.digest(), columns(rows)["tokens"].tolist()


def test_what_fails_on_one_host_fails_on_all_and_the_next_start_goes_on(config, tmp_path):
    def body(hosts, tokenizers):
        with pytest.raises(PeerError, match="(?s)process 1.*the disk is gone") as caught:
            load(hosts, config, tokenizers)
        return str(caught.value)

    texts = run_threads(body, 2, [Counting(), Counting(fail_at=4)])
    assert texts[0] == texts[1]
    complete = len(list((tmp_path / "cache").glob("*/chunk-*.json")))
    assert complete >= 3 and not list((tmp_path / "cache").glob("*/metadata.json"))
    (cache,) = {path.parent for path in (tmp_path / "cache").glob("*/chunk-*.json")}
    (cache / "chunk-00009.rows.ab.tmp").touch()
    os.utime(cache / "chunk-00009.rows.ab.tmp", (0, 0))
    oracle = load_alone(with_cache(config, tmp_path / "other"), whole := Counting())
    rest = [Counting() for _ in range(2)]
    assert run_threads(load, 2, config, rest) == [oracle] * 2
    assert sum(one.calls for one in rest) == whole.calls - complete
    assert not list(cache.glob("*.tmp"))


@pytest.mark.slow
def test_a_slow_host_is_waited_for(config):
    """Longer than any wait may last, as long as something is read."""
    tokenizers = [Counting(), Counting(delay_s=0.6)]
    start = time.monotonic()
    run_threads(load, 2, config, tokenizers, timeout_s=3.0)
    assert time.monotonic() - start > 3.0


@pytest.mark.slow
def test_a_host_that_reads_nothing_is_given_up(config, monkeypatch):
    monkeypatch.setattr(own_work, "STOP_S", 0.05)

    def body(hosts, tokenizers):
        with pytest.raises(PeerError, match=r"(?s)process 1.*nothing of .*x.jsonl was read for 3 s"):
            load(hosts, config, tokenizers)

    run_threads(body, 2, [Counting(), Counting(stall_s=60.0)], timeout_s=3.0)


def test_hosts_with_disks_of_their_own_build_all(config, tmp_path, caplog):
    def body(hosts, tokenizers):
        return load(hosts, with_cache(config, tmp_path / f"disk-{hosts.index}"), tokenizers)

    tokenizers = [Counting(), Counting()]
    first, second = run_threads(body, 2, tokenizers)
    assert first == second and tokenizers[0].calls == tokenizers[1].calls == 14
    assert "not one directory for all hosts" in caplog.text and "gs://" in caplog.text


def test_hosts_with_other_files_are_told(config, tmp_path):
    other = write(tmp_path / "elsewhere.jsonl", [{"text": "another"}])

    def body(hosts):
        mine = config if hosts.index == 0 else LmDataConfig(**{**vars(config), "train_urls": other})
        with pytest.raises(Exception, match=r"files of data.train_urls"):
            mine.load(Tokenizer(), 16, 0, hosts)

    run_threads(body, 2)


def test_a_cache_in_a_bucket(config):
    """The same rows through a file system without a disk."""
    oracle = load_alone(config, Tokenizer())
    assert run_threads(load, 2, with_cache(config, "memory://caches"), [Tokenizer()] * 2) == [oracle] * 2


def test_what_changes_the_rows_has_another_cache(config, tmp_path):
    class Other(Tokenizer):
        chat_template = "another"

    def made(values, tokenizer):
        LmDataConfig(**{**vars(config), **values}).load(tokenizer, 16, 0)
        return len(list((tmp_path / "cache").iterdir()))

    assert made({}, Tokenizer()) == made({"shuffle": False, "max_bad_rows": 7}, Tokenizer()) == 1
    assert made({"max_seq_len": 11}, Tokenizer()) == 2
    assert made({}, Other()) == 3
    assert made({"packing": True}, Tokenizer()) == 4
    write(tmp_path / "x.jsonl", [{"text": "changed"}])
    assert made({}, Tokenizer()) == 5


def test_a_cache_directory_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Exception, match=r"data.cache_dir .*/file cannot be written to.*bucket that can"):
        with_cache(config, tmp_path / "file").load(Tokenizer(), 16, 0)


def test_the_leader_shows_progress_and_who_is_last(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(build, "FIRST_S", 0.0)

    def body(hosts):
        progress = BuildProgress(hosts, 200)
        progress.show([(100, 100), (50, 100)])
        progress.close()
        return hosts.last_phase

    assert run_threads(body, 2) == ["building the data cache, 75%"] * 2
    (line,) = [record.message for record in caplog.records]
    assert "150 B of 200 B read" in line and "process 1 is last with 50%" in line


def test_the_default_is_below_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert build.default_cache_dir() == "/caches/lockstep/data"


def test_at_a_terminal_there_is_a_bar_until_the_data_is_there(monkeypatch):
    monkeypatch.setattr(build, "FIRST_S", 0.0)
    monkeypatch.setattr(build, "console", lambda: console)
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = BuildProgress(Hosts(*MemoryClient.hub(1)), 200)
    progress.show([(50, 200)])
    assert progress._bar.live.is_started and progress._bar.tasks[0].percentage == 25
    progress.close()
    assert not progress._bar.live.is_started and "data cache" in console.file.getvalue()
