import json

import numpy as np
import pytest

from lockstep.batch_inference import merge as merging
from lockstep.batch_inference.manifest import check_manifest, write_manifest
from lockstep.batch_inference.merge import agree_on_owners, merge
from lockstep.batch_inference.row_files import RowFile, RowIndex, host_file
from lockstep.batch_inference.shard import JobShape
from lockstep.batch_inference.summary import Totals, add_up
from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import Hosts
from lockstep.report import read_jsonl
from tests.multiprocess.harness import run_threads

SHAPE = JobShape(rounds=2, prompts=5, generations=2)


def row(number, text="tëxt"):
    unit, generation = divmod(number, SHAPE.generations)
    round_, prompt = divmod(unit, SHAPE.prompts)
    return {
        "round": round_,
        "prompt_id": prompt,
        "generation_id": generation,
        "prompt": f"prompt {prompt}",
        "generated_text": f"{text} {number}",
        "num_tokens": number,
        "finish_reason": "stop",
        "length": float(number),
    }


def write(directory, host, numbers, **values):
    index = RowIndex(SHAPE)
    RowFile(host_file(directory, host), index).append([row(number, **values) for number in numbers])
    return index


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
    monkeypatch.setattr(merging, "GATHER_BYTES", limit)
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


def test_rows_of_another_job_are_refused_with_what_differs(tmp_path):
    manifest = {"seed": 0, "checkpoint": "aa", "metrics": []}
    assert check_manifest(tmp_path, manifest, force=False) == []
    write_manifest(tmp_path, manifest, 0)
    assert check_manifest(tmp_path, manifest, force=False) == []
    changed = {**manifest, "seed": 1, "checkpoint": "bb"}
    with pytest.raises(ConfigError, match=r'checkpoint was "aa" and is "bb"; seed was 0 and is 1.*--resume force'):
        check_manifest(tmp_path, changed, force=False)
    assert check_manifest(tmp_path, changed, force=True) == ['checkpoint was "aa" and is "bb"', "seed was 0 and is 1"]


def test_rows_of_unknown_origin_are_refused(tmp_path):
    write(tmp_path, 0, [0])
    with pytest.raises(ConfigError, match=r"has rows but no job.json"):
        check_manifest(tmp_path, {}, force=False)
