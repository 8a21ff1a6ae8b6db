import os

import pytest

from lockstep.errors import LockstepError
from lockstep.report import append_jsonl, drop_later
from lockstep.report.follow import FollowedFile


def steps(news):
    return [record["step"] for _, record in news.records]


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = FollowedFile(path)
    assert file.look().records == []
    append_jsonl(path, [{"step": 0}, {"step": 1}])
    assert steps(file.look()) == [0, 1]
    assert file.look().records == []
    append_jsonl(path, [{"step": 2}])
    news = file.look()
    assert news.taken_back == 0 and news.records == [(f"{path}:3", {"step": 2})]


def test_half_a_line_waits_for_the_other_half(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"st')
    file = FollowedFile(path)
    assert steps(file.look()) == [0]
    with open(path, "a") as writer:
        writer.write('ep": 1}')
    assert steps(file.look()) == []
    assert steps(file.look(at_end=True)) == [1]
    with open(path, "a") as writer:
        writer.write('\n{"step": 2}\n')
    assert steps(file.look()) == [2]


def test_a_run_that_goes_on_from_a_checkpoint_takes_lines_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [{"step": step} for step in range(5)])
    file = FollowedFile(path)
    file.look()
    drop_later(path, 2)
    append_jsonl(path, [{"step": 3, "again": True}])
    news = file.look()
    assert (news.taken_back, news.records) == (2, [(f"{path}:4", {"step": 3, "again": True})])
    append_jsonl(path, [{"step": 4}])
    assert steps(file.look()) == [4]


@pytest.mark.parametrize("longer", [False, True])
def test_a_file_that_is_written_over_in_place_is_read_anew(tmp_path, longer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 10}\n{"step": 11}\n')
    file = FollowedFile(path)
    file.look()
    inode = os.stat(path).st_ino
    path.write_text('{"step": 10}\n' + '{"step": 22}\n' * (3 if longer else 0))
    assert os.stat(path).st_ino == inode
    news = file.look()
    assert (news.taken_back, steps(news)) == (1, [22] * (3 if longer else 0))


def test_a_line_that_is_not_a_record_is_said_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n\n[1]\n')
    with pytest.raises(LockstepError, match=r"rows\.jsonl:3: a JSON object was expected, not b'\[1\]'"):
        FollowedFile(path).look()
