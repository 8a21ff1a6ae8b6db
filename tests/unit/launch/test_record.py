"""What is kept of a job."""

import argparse
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.main import main
from lockstep.launch.record import Attempt, find_record, load_record, new_record


@pytest.fixture(autouse=True)
def jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def options(**more):
    given = {"backend": "ssh", "command": ["python", "x y"], "env": [("A_KEY", "verysecret")], "dry_run": False}
    return argparse.Namespace(**given, env_file=Path("/my/secrets.env"), hosts="a,b", log=Path("x"), **more)


def test_a_record_is_written_whole_and_read_again_without_secrets(jobs):
    record = new_record(options(), "job").with_attempt(Attempt(number=1, id="attempt-1-x", started=1.0))
    record = record.with_attempt(Attempt(number=1, id="attempt-1-x", started=1.0, ended=2.0, code=3, cause="c"))
    record = record.with_attempt(Attempt(number=2, id="attempt-2-y", started=4.0))
    record.save()
    assert load_record("job") == record and [each.code for each in record.attempts] == [3, None]
    text = (jobs / "job" / "job.json").read_text()
    assert (
        "verysecret" not in text
        and "secrets.env" not in text
        and [p.name for p in (jobs / "job").iterdir()] == ["job.json"]
    )
    namespace = load_record("job").namespace()
    assert (namespace.hosts, namespace.log, namespace.env, namespace.command) == ("a,b", "x", [], ["python", "x y"])


def test_what_is_wrong_with_a_name_or_a_record(jobs):
    for name in ("", "../x", "a b", ".hidden", "x" * 101):
        with pytest.raises(ConfigError, match="--name is"):
            new_record(options(), name)
        with pytest.raises(ConfigError, match="--name is"):
            find_record(name)
    assert find_record("job") is None
    with pytest.raises(ConfigError, match="no job 'job' in .*; there is none"):
        load_record("job")
    (jobs / "job").mkdir(parents=True)
    (jobs / "job" / "job.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read .* remove it to forget the job"):
        load_record("job")
    (jobs / "job" / "job.json").write_text('{"name": "../other", "attempts": [], "command": []}')
    with pytest.raises(ConfigError, match=r"it is of job '../other'"):
        load_record("job")


def test_a_record_names_no_module_to_import(jobs, tmp_path, monkeypatch, capsys):
    (tmp_path / "handed_over.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    new_record(argparse.Namespace(backend="handed_over:Backend", command=["x"]), "job").save()
    assert main(["status", "job"]) == 1
    assert "If it is your own, give it: --backend handed_over:Backend" in capsys.readouterr().err
    assert not Path("ran").exists()
    assert main(["status", "job", "--backend", "handed_over:Backend"]) == 1
    assert Path("ran").exists()
