import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.batch_inference import row_files
from lockstep.batch_inference.row_files import (
    RemoteRows,
    RowFile,
    RowIndex,
    agree_on_owners,
    check_manifest,
    host_file,
    merge,
    union,
    upload_rows,
    write_manifest,
)
from lockstep.batch_inference.summary import Totals, add_up
from lockstep.errors import ConfigError, LockstepError, PeerError, PromptError
from lockstep.hosts import Hosts
from lockstep.report import read_jsonl
from lockstep.text import load_tokenizer, read_prompts, stop_ids
from tests import fake_gcs
from tests.multiprocess.harness import run_threads
from tests.unit.batch_inference.made_up_rows import SHAPE, row, write


def test_the_index_finds_every_whole_line_and_nothing_else(tmp_path):
    write(tmp_path, 0, [3, 0])
    write(tmp_path, 7, [1, 3], text="again")
    with open(host_file(tmp_path, 7), "ab") as file:
        file.write(b'{"round": 9, "prompt_id": 0, "generation_id": 0}\nnot json\n{"round": 0, "prompt_id": 1, "gene')
    index = RowIndex(SHAPE)
    index.scan(tmp_path)
    assert np.flatnonzero(index.present).tolist() == [0, 1, 3]
    texts = [json.loads(line)["generated_text"] for line in index.read([3, 1, 0])]
    assert texts == ["tëxt 3", "again 1", "tëxt 0"], "the first file that has a row counts"


def test_a_torn_last_line_is_mended_before_the_next_row(tmp_path):
    path = host_file(tmp_path, 0)
    write(tmp_path, 0, [0, 1])
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:-cut])
        index = RowIndex(SHAPE)
        file = RowFile(path, index)
        index.scan(tmp_path)
        kept = np.flatnonzero(index.present).tolist()
        assert kept == ([0, 1] if cut == 1 else [0] if cut <= len(whole.splitlines()[1]) + 2 else [])
        file.append([row(9)])
        assert [each["num_tokens"] for each in read_jsonl(path)] == [*kept, 9]
        assert np.flatnonzero(index.present).tolist() == [*kept, 9]


@pytest.mark.parametrize("number", ['"0"', "0.0", "true", "null", "[0]", "1e999", "[" * 60_000, "9" * 5_000, "-1"])
def test_a_line_that_is_no_row_is_left_out(tmp_path, number):
    host_file(tmp_path, 0).write_text(f'{{"round": 0, "prompt_id": 0, "generation_id": {number}}}\n')
    index = RowIndex(SHAPE)
    assert index.scan_file(host_file(tmp_path, 0)) == 1 and not index.present.any()


def test_rows_of_another_job_are_refused_with_what_differs(tmp_path):
    manifest = {"seed": 0, "checkpoint": "aa", "metrics": []}
    assert check_manifest(tmp_path, manifest, force=False) == []
    write_manifest(tmp_path, manifest)
    assert check_manifest(tmp_path, manifest, force=False) == []
    changed = {**manifest, "seed": 1, "checkpoint": "bb"}
    with pytest.raises(ConfigError, match=r'checkpoint was "aa" and is "bb"; seed was 0 and is 1.*--resume force'):
        check_manifest(tmp_path, changed, force=False)
    assert check_manifest(tmp_path, changed, force=True) == ['checkpoint was "aa" and is "bb"', "seed was 0 and is 1"]


def test_rows_of_unknown_origin_are_refused(tmp_path):
    write(tmp_path, 0, [0])
    with pytest.raises(ConfigError, match=r"has rows but no job.json"):
        check_manifest(tmp_path, {}, force=False)


def test_a_setting_that_only_one_of_two_jobs_has_makes_them_differ(tmp_path):
    write_manifest(tmp_path, {"seed": 0, "old": 1})
    assert check_manifest(tmp_path, {"seed": 0, "new": 2}, force=True) == [
        "old was 1 and is null",
        "new was null and is 2",
    ]


def test_a_manifest_appears_whole_and_leaves_nothing_temporary(tmp_path):
    path = write_manifest(tmp_path / "rows", {"seed": 0})
    assert [each.name for each in path.parent.iterdir()] == ["job.json"]


def remote_of(tmp_path, **objects):
    """Rows behind a URL, with the numbers of those in each object."""
    there = tmp_path / "there"
    for name, numbers in objects.items():
        write(there / name, 0, numbers)
        host_file(there / name, 0).rename(there / f"samples-host-000-{name}-000000.jsonl")
    return RemoteRows(f"file://{there}", 0), there


def test_another_job_behind_a_url_is_refused_and_leaves_nothing_here(tmp_path):
    remote, there = remote_of(tmp_path, a=[0])
    with pytest.raises(ConfigError, match=r"file://.*there has rows but no job.json"):
        remote.check({"seed": 0}, force=False)
    assert remote.check({"seed": 0}, force=True) == []
    write_manifest(there, {"seed": 0})
    assert remote.check({"seed": 0}, force=False) == []
    with pytest.raises(ConfigError, match=r"file://.*there has rows of a job that differs.*seed was 0 and is 1"):
        remote.check({"seed": 1}, force=False)
    assert remote.check({"seed": 1}, force=True) == ["seed was 0 and is 1"]
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_fetching_leaves_the_manifest_here_and_the_rows_that_are_there_now(tmp_path):
    remote, there = remote_of(tmp_path, a=[0, 1], b=[2])
    write_manifest(there, {"seed": 1})
    here = tmp_path / "here"
    manifest = write_manifest(here, {"seed": 0})
    remote.fetch(here, 1)
    assert [each["num_tokens"] for each in read_jsonl(here / "samples-host-000-found.jsonl")] == [0, 1, 2]
    remote.fetch(here, 2)
    assert [each["num_tokens"] for each in read_jsonl(here / "samples-host-000-found.jsonl")] == [0, 1]
    for each in there.glob("samples-*"):
        each.unlink()
    remote.fetch(here, 2)
    assert list(here.iterdir()) == [manifest] and json.loads(manifest.read_text()) == {"seed": 0}


def body_upload(hosts, directories, url):
    remote, index = RemoteRows(url, hosts.index), RowIndex(SHAPE)
    fetched = remote.fetch(directories[hosts.index], hosts.count)
    if fetched is not None:
        index.scan_file(fetched)
    there = index.present
    hosts.barrier("fetched")
    index.scan(directories[hosts.index])
    found = union(hosts, "found", index.present)
    upload_rows(hosts, remote, index, found & ~union(hosts, "there", there))
    return np.flatnonzero(found).tolist()


@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "a directory of each"])
def test_rows_that_are_on_disks_alone_are_uploaded_once(tmp_path, shared):
    _, there = remote_of(tmp_path, a=[0, 1], b=[2])
    directories = [tmp_path / "here" if shared else tmp_path / str(host) for host in range(2)]
    write(directories[0], 0, [2, 4, 5])  # row 2 is in what the other host fetches
    write(directories[1], 1, [1, 5, 6])
    write(directories[1], 7, [7])  # of a host that takes no part any more
    for _ in range(2):
        assert run_threads(body_upload, 2, directories, f"file://{there}") == [[0, 1, 2, 4, 5, 6, 7]] * 2
        rows = [each for path in there.glob("samples-*") for each in read_jsonl(path)]
        assert sorted(each["num_tokens"] for each in rows) == [0, 1, 2, 4, 5, 6, 7]


PROMPTS = [{"prompt": f"What is {i} plus {i * i}?", "answer": str(i + i * i)} for i in range(3)]
GENERATION_CONFIG = {"eos_token_id": [3, 4]}


@pytest.fixture
def bucket(monkeypatch, checkpoint):
    with fake_gcs.serve_here(monkeypatch) as bucket:
        for path in checkpoint.iterdir():
            bucket.objects[f"bucket/models/tiny/{path.name}"] = path.read_bytes()
        bucket.objects["bucket/models/tiny/generation_config.json"] = json.dumps(GENERATION_CONFIG).encode()
        lines = "".join(json.dumps(each) + "\n" for each in PROMPTS)
        bucket.objects["bucket/data/prompts.jsonl"] = lines.encode()
        yield bucket


@pytest.mark.nightly  # in make slow: multiprocess/test_sample_load.py
def test_a_whole_run_from_a_bucket_into_a_bucket(bucket, checkpoint, tmp_path, sample):
    values = {
        "hf_checkpoint": "gs://bucket/models/tiny",
        "prompts": "gs://bucket/data/prompts.jsonl",
        "host_data_parallel_output_dir": "gs://bucket/answers",
        "max_new_tokens": 8,
    }
    sample("first", **values)

    # The rows are those of a run that knows nothing of buckets.
    (tmp_path / "prompts.jsonl").write_bytes(bucket.objects["bucket/data/prompts.jsonl"])
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    sample("local", hf_checkpoint=str(copy), prompts=str(tmp_path / "prompts.jsonl"), max_new_tokens=8)
    merged = (tmp_path / "local" / "samples" / "samples.jsonl").read_bytes()
    assert bucket.objects["bucket/answers/samples.jsonl"] == merged

    assert not list(tmp_path.glob("first/samples/.*"))

    # Every batch is an object; the machine is lost, and with it some of them.
    parts = sorted(name for name in bucket.objects if name.startswith("bucket/answers/samples-host-000-"))
    assert len(parts) == len(PROMPTS), "max_prompts_per_batch is 1"
    assert [len(bucket.objects[name].splitlines()) for name in parts] == [2] * len(parts)
    for name in (parts[1], "bucket/answers/samples.jsonl"):
        del bucket.objects[name]
    tracker = sample("second", **values)
    assert tracker.values["sample/resumed_completions"] == 4
    assert bucket.objects["bucket/answers/samples.jsonl"] == merged
    assert len(read_jsonl(tmp_path / "second" / "samples" / "samples-host-000.jsonl")) == 2

    with pytest.raises(PeerError, match="max_new_tokens was 8 and is 9"):
        sample("third", **values | {"max_new_tokens": 9})
    del bucket.objects[f"bucket/answers/{row_files.MANIFEST}"]
    with pytest.raises(PeerError, match=r"has rows but no job.json"):
        sample("fourth", **values)


def test_a_tokenizer_behind_a_url_is_the_one_of_its_directory(bucket, checkpoint):
    ours, theirs = load_tokenizer("gs://bucket/models/tiny"), load_tokenizer(checkpoint)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert stop_ids(ours) == tuple(sorted({*stop_ids(theirs), 3, 4}))
    with pytest.raises(ConfigError, match=r"'gs://bucket/data' holds none of tokenizer\.json"):
        load_tokenizer("gs://bucket/data")
    with pytest.raises(ConfigError, match=r"'gs://bucket/nothing' holds none of tokenizer\.json"):
        load_tokenizer("gs://bucket/nothing")


def test_what_the_service_refuses_is_said_as_it_says_it(bucket):
    assert len(read_prompts(["one"])) == 1
    with pytest.raises(PromptError, match="'gs://bucket/data/none.jsonl' does not exist"):
        read_prompts("gs://bucket/data/none.jsonl")
    bucket.refuse = "you may not read this"
    with pytest.raises(PromptError, match=r"could not be read .*Forbidden.*\n?.*you may not read this"):
        read_prompts("gs://bucket/data/prompts.jsonl")


def body_merge(hosts, directories, numbers):
    directory = directories[hosts.index]
    index = write(directory, hosts.index, numbers[hosts.index])
    index.scan(directory)
    owner = agree_on_owners(hosts, index)
    path = merge(hosts, index, owner, directory)
    totals = add_up(hosts, Totals().add(index.read(np.flatnonzero(owner == hosts.index))))
    assert (path is None) == (totals is None) == (not hosts.is_leader)
    return path, totals


@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "a directory of each"])
@pytest.mark.parametrize("limit", [1, 300, 10**6])
def test_merging_puts_all_rows_in_order_whoever_has_them(tmp_path, monkeypatch, shared, limit):
    monkeypatch.setattr(row_files, "GATHER_BYTES", limit)
    directories = [tmp_path if shared else tmp_path / str(host) for host in range(3)]
    numbers = [[5, 4, 19, 18], [*range(6, 18), 4], [0, 1, 2, 3]]
    sent, gather = [], Hosts.gather

    def counting(self, name, value):
        if name.startswith("rows "):
            sent.append(len(value))
        return gather(self, name, value)

    monkeypatch.setattr(Hosts, "gather", counting)
    path, totals = run_threads(body_merge, 3, directories, numbers)[0]
    assert read_jsonl(path) == [row(number) for number in range(SHAPE.rows)]
    longest = max(len(line) for line in path.read_bytes().splitlines(keepends=True))
    assert max(sent) <= max(limit // 3, longest), "what a host sends at a time"
    assert shared or max(sent) > 0
    assert (totals.rows, totals.tokens, totals.finish) == (20, 190, {"stop": 20})
    assert totals.means == {"length": 9.5}
    assert not list(path.parent.glob(".*")), "nothing temporary is left"


def test_a_row_that_nobody_has_is_an_error_on_all(tmp_path):
    with pytest.raises(LockstepError, match=r"1 of 20 rows are on no host's disk \(the first is row 19\)"):
        run_threads(body_merge, 2, [tmp_path, tmp_path], [list(range(10)), list(range(10, 19))])
