import os

import pytest

from lockstep.errors import ConfigError
from lockstep.report.run_files import find_run, require_rows


def make(directory, *names):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return directory


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("samples.jsonl", "rollouts.jsonl", "metrics.jsonl"), ["samples.jsonl"]),
        (("samples/samples.jsonl", "samples/samples-host-000.jsonl"), ["samples.jsonl"]),
        (
            ("samples/samples-host-001.jsonl", "samples/samples-host-000.jsonl"),
            [f"samples-host-00{n}.jsonl" for n in (0, 1)],
        ),
        (("rollouts.jsonl",), ["rollouts.jsonl"]),
        ((), []),
    ],
)
def test_a_directory_has_one_kind_of_rows(tmp_path, names, rows):
    run = find_run(make(tmp_path / "run", *names) if names else tmp_path)
    assert [path.name for path in run.rows] == rows
    assert run.name == ("run" if names else tmp_path.name)


def test_a_file_has_the_metrics_beside_it(tmp_path):
    directory = make(tmp_path / "run", "rollouts.jsonl", "mine.jsonl", "metrics.jsonl", "metrics-1.jsonl")
    for file, name in (("rollouts.jsonl", "run"), ("mine.jsonl", "run/mine")):
        run = find_run(directory / file)
        assert (run.name, run.rows) == (name, (directory / file,))
        assert [path.name for path in run.metrics] == ["metrics-1.jsonl", "metrics.jsonl"]


def test_what_is_not_there_is_said_with_what_is_near(tmp_path):
    make(tmp_path / "old", "samples.jsonl")
    make(tmp_path / "new", "metrics.jsonl")
    os.utime(tmp_path / "old", (1, 1))
    with pytest.raises(ConfigError, match=r"nwe does not exist\. Name the directory of a run .* Did you mean .*/new\?"):
        find_run(tmp_path / "nwe")
    with pytest.raises(ConfigError, match=r"has no samples\.jsonl and no rollouts\.jsonl\. .* Did you mean .*/new\?"):
        require_rows(find_run(tmp_path))
    with pytest.raises(ConfigError, match=r"gs://bucket/run is a URL; only local files are read"):
        find_run("gs://bucket/run")


def test_the_stamp_changes_with_what_is_written_or_replaced(tmp_path):
    make(tmp_path, "samples.jsonl", "metrics.jsonl")
    stamps = {find_run(tmp_path).stamp()}
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    stamps.add(find_run(tmp_path).stamp())
    (tmp_path / "draft").write_text("")
    os.replace(tmp_path / "draft", tmp_path / "samples.jsonl")
    run = find_run(tmp_path)
    stamps.add(run.stamp())
    assert len(stamps) == 3 and run.stamp() in stamps
    (tmp_path / "samples.jsonl").unlink()
    assert len(run.stamp()) == 1
