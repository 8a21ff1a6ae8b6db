"""All rows of a job in one file."""

import numpy as np
import pytest

from lockstep.batch_inference import merge as merging
from lockstep.batch_inference.merge import agree_on_owners, merge
from lockstep.batch_inference.summary import Totals, add_up
from lockstep.errors import LockstepError
from lockstep.hosts import Hosts
from lockstep.report import read_jsonl
from tests.multiprocess.harness import run_threads
from tests.unit.batch_inference.made_up_rows import SHAPE, row, write


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
