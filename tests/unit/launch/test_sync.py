"""The files that are copied to workers."""

import subprocess
import tarfile

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.sync import check_configuration, make_archive


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code" / "__pycache__").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("a")
    (tmp_path / "code" / "run.sh").write_text("run")
    (tmp_path / "code" / "run.sh").chmod(0o755)
    (tmp_path / "code" / "link").symlink_to("a.py")
    (tmp_path / "code" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "code" / "big.log").write_text("log")
    return tmp_path


def names(archive):
    with tarfile.open(archive.path) as tar:
        return tar.getnames()


@pytest.mark.parametrize("words", [["--config_path", "code/run.sh"], ["--config_path=./code/run.sh"]])
def test_a_configuration_that_the_workers_would_not_find_is_refused(folder, words):
    for given in ([], ["code/a.py"]):
        with pytest.raises(
            ConfigError, match="--config_path .*code/run.sh is a file of this machine.*--sync code,.*--workdir"
        ):
            check_configuration(["lockstep", "train-lm", *words], given, None)
    for given, workdir in ((["code"], None), (["."], None), (["code/run.sh"], None), ([], "~/repository")):
        check_configuration(["lockstep", "train-lm", *words], given, workdir)


@pytest.mark.parametrize("path", ["none.yaml", "gs://bucket/x.yaml", "/etc/hostname", "../x.yaml"])
def test_a_configuration_that_is_no_file_below_the_present_directory_is_the_workers(folder, path):
    check_configuration(["lockstep", "train-lm", "--config_path", path], [], None)


def test_a_directory_without_git(folder):
    archive = make_archive(["code"], None, folder / "x.tar.gz")
    assert names(archive) == ["code/a.py", "code/big.log", "code/link", "code/run.sh"]
    with tarfile.open(archive.path) as tar:
        assert tar.getmember("code/run.sh").mode & 0o111 and tar.getmember("code/link").linkname == "a.py"
        assert {member.uname for member in tar} == {""}


def test_git_says_what_belongs_to_a_repository(folder):
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text("*.log\n__pycache__/\n")
    subprocess.run(["git", "add", "code/a.py"], check=True)
    (folder / "code" / "new.py").write_text("not added yet")
    assert names(make_archive(["code"], None, folder / "x.tar.gz")) == [
        f"code/{name}" for name in ("a.py", "link", "new.py", "run.sh")
    ]


def test_the_digest_is_that_of_names_modes_and_contents(folder):
    def digest():
        return make_archive(["code", "code/a.py"], None, folder / "x.tar.gz").digest

    first = digest()
    (folder / "code" / "a.py").touch()
    assert digest() == first
    (folder / "code" / "run.sh").chmod(0o644)
    second = digest()
    (folder / "code" / "a.py").write_text("b")
    assert len({first, second, digest()}) == 3
