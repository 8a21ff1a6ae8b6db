import json

import numpy as np
import pytest

from lockstep.batch_inference.row_files import RowFile, RowIndex, host_file
from lockstep.report import read_jsonl
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
