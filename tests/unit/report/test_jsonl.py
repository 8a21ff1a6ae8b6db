import json

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import append_jsonl, read_jsonl
from lockstep.report.jsonl import drop_later, numbered_records, repair_jsonl


def test_appends_whole_lines_and_reads_them_back(tmp_path):
    path = tmp_path / "below" / "rows.jsonl"
    append_jsonl(path, [{"a": 1}, {"a": "↵ \n"}])
    append_jsonl(path, [])
    append_jsonl(path, [{"a": None}], fsync=True)
    assert read_jsonl(path) == [{"a": 1}, {"a": "↵ \n"}, {"a": None}]
    assert path.read_bytes().count(b"\n") == 3


def test_floats_that_json_has_no_word_for_stay_readable(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [{"loss": float("nan"), "all": [float("inf"), -float("inf")], "some": {"x": 1.5}}])
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "loss": "NaN",
        "all": ["Infinity", "-Infinity"],
        "some": {"x": 1.5},
    }


def test_half_of_a_surrogate_pair_costs_neither_its_row_nor_the_others(tmp_path):
    path, rows = tmp_path / "rows.jsonl", [{"a": "ä"}, {"fields": {"title": "ä cut \ud83d"}}, {"b": 2}]
    append_jsonl(path, rows)
    assert read_jsonl(path) == rows
    assert "ä".encode() in path.read_bytes().splitlines()[0], "other lines are as before"


@pytest.mark.parametrize("filler", [0, 70_000])
def test_a_torn_last_line_is_removed_with_a_warning(tmp_path, caplog, filler):
    path = tmp_path / "rows.jsonl"
    torn = b'{"b": "' + b"x" * filler
    path.write_bytes(b'{"a": 1}\n' + torn)
    assert read_jsonl(path) == [{"a": 1}]
    append_jsonl(path, [{"c": 3}])
    assert read_jsonl(path) == [{"a": 1}, {"c": 3}]
    assert "torn line" in caplog.text
    path.write_bytes(torn)
    assert repair_jsonl(path) == len(torn)
    assert path.read_bytes() == b""
    path.write_bytes(b"\n" + torn)
    assert repair_jsonl(path) == len(torn), "an empty line is one"


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}')
    append_jsonl(path, [{"c": 3}])
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert not caplog.text


def test_errors_name_the_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"b": 2}\n')
    with pytest.raises(LockstepError, match=r"rows\.jsonl:2 is not JSON: .*Remove or mend the line"):
        read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(LockstepError, match=r"rows\.jsonl:1 is a JSON list, not an object"):
        read_jsonl(path)
    with pytest.raises(ConfigError, match="object stores have no append. Use a local path"):
        append_jsonl("gs://bucket/rows.jsonl", [{}])


def test_records_of_later_steps_are_dropped_and_so_is_a_torn_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    append_jsonl(path, [{"step": 1, "a": "ä"}, {"step": 3}, {"note": "no step"}, {"step": 2}])
    whole = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:
        file.write(b'{"step": 2, "a"')
    assert drop_later(path, 2) == 2
    assert path.read_bytes().splitlines(keepends=True) == [whole[0], *whole[2:]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_has_nothing_to_drop(tmp_path):
    assert drop_later(tmp_path / "none.jsonl", 2) == 0


def test_damaged_lines_that_a_resume_drops_are_counted_and_said(tmp_path, caplog):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 1, "prom\n[2]\n\x80\n{"step": 3}\n')
    assert drop_later(path, 2) == 4 and path.read_bytes() == b'{"step": 1}\n'
    assert "samples.jsonl: 3 damaged lines are removed, which are no JSON objects; the first was line 2." in caplog.text
    caplog.clear()
    assert drop_later(path, 0) == 1 and not caplog.records


def test_lines_have_their_numbers_and_half_of_a_last_line_is_named(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a": ')
    assert numbered_records(path) == ([(1, {"a": 1}), (3, {"a": 2})], 4)
    assert not caplog.text


def test_lists_without_end_are_not_json_that_can_be_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": ' + "[" * 100_000 + "\n")
    with pytest.raises(
        LockstepError, match=r"rows\.jsonl:1 is JSON that is nested too deeply to be read\. Remove or mend the line\."
    ):
        read_jsonl(path)
