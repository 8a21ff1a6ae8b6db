"""Files of prompts, as tables have them."""

import datetime
import decimal
import json

import pytest

from lockstep.errors import PromptError
from lockstep.text import read_prompts


@pytest.mark.parametrize(("kind", "mark"), [("csv", ","), ("tsv", "\t")])
def test_prompts_of_a_table(tmp_path, kind, mark):
    path = tmp_path / f"prompts.{kind}"
    rows = [["prompt", "answer", "id"], ['"one,\n""two""\tthree"', "7", "a"], ["four", "", "b"]]
    path.write_bytes(b"\xef\xbb\xbf" + "".join(mark.join(row) + "\r\n" for row in rows).encode())
    first, second = read_prompts(str(path))
    assert (first.text, first.answer, first.fields) == ('one,\n"two"\tthree', "7", {"id": "a"})
    assert (second.text, second.answer, second.fields) == ("four", None, {"id": "b"}), (
        "no answer, which no metric scores"
    )
    path.write_text(f"prompt{mark}answer\none\n", encoding="utf-8")
    with pytest.raises(PromptError, match=rf"prompts\.{kind}:2 has another number of values than the first line has"):
        read_prompts(str(path))


def test_columns_of_one_name_are_refused_and_a_file_without_rows_holds_no_prompts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.csv").write_text("prompt,prompt\none,two\n", encoding="utf-8")
    texts = pyarrow.array(["one"])
    parquet.write_table(pyarrow.Table.from_arrays([texts, texts], ["prompt", "prompt"]), tmp_path / "a.parquet")
    for kind, text in (("csv", r"a\.csv:1 has the name 'prompt' twice"), ("parquet", r"has two columns 'prompt'")):
        with pytest.raises(PromptError, match=text):
            read_prompts(str(tmp_path / f"a.{kind}"))
    parquet.write_table(pyarrow.table({"prompt": texts[:0]}), tmp_path / "none.parquet")
    with pytest.raises(PromptError, match=r"none\.parquet holds no prompts"):
        read_prompts(str(tmp_path / "none.parquet"))


def test_values_of_a_table_are_such_as_rows_of_samples_can_have(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    moment, day = datetime.datetime(2026, 11, 29, 8, 30), datetime.date(2026, 11, 29)
    columns = {"prompt": ["a"], "answer": [decimal.Decimal("19")], "at": [[{"time": moment}]], "day": [day]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (prompt,) = read_prompts(str(tmp_path / "a.parquet"))
    assert prompt.answer == "19"
    assert json.loads(json.dumps(prompt.fields)) == {"at": [{"time": "2026-11-29 08:30:00"}], "day": "2026-11-29"}
    parquet.write_table(pyarrow.table({"prompt": ["a"], "image": [{"bytes": b"\xff"}]}), tmp_path / "a.parquet")
    with pytest.raises(PromptError, match=r"a\.parquet:1 has bytes in 'image'.* Remove the column"):
        read_prompts(str(tmp_path / "a.parquet"))
