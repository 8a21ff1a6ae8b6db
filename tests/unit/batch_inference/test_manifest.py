"""Rows of two jobs never mix."""

import pytest

from lockstep.batch_inference.manifest import check_manifest, write_manifest
from lockstep.errors import ConfigError
from tests.unit.batch_inference.made_up_rows import write


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


def test_a_setting_that_only_one_of_two_jobs_has_makes_them_differ(tmp_path):
    write_manifest(tmp_path, {"seed": 0, "old": 1}, 0)
    assert check_manifest(tmp_path, {"seed": 0, "new": 2}, force=True) == [
        "old was 1 and is null",
        "new was null and is 2",
    ]


def test_a_manifest_appears_whole_and_leaves_nothing_temporary(tmp_path):
    path = write_manifest(tmp_path / "rows", {"seed": 0}, 3)
    assert [each.name for each in path.parent.iterdir()] == ["job.json"]
