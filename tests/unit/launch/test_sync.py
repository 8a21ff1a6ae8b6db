"""The files that are copied to workers."""

import os
import shutil
import subprocess
import tarfile

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.machines import Ssh
from lockstep.launch.options import parse_options
from lockstep.launch.sync import check_configuration, files_of, make_archive
from tests.git import needs_git


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


def test_a_module_that_a_configuration_names_comes_with_it(folder):
    (folder / "code" / "run.yaml").write_text("rewards: [{type: function, function: 'judge:score'}]\n")
    (folder / "code" / "judge.py").write_text("def score(row, prompt): ...\n")

    def sync(*given):
        words = [word for each in given for word in ("--sync", each)]
        command = ["lockstep", "train-grpo", "--config_path", "code/run.yaml", "--rewards.0.type=a:Length"]
        return parse_options(["--backend", "ssh", "--hosts", "a", *words, "--", *command], {"ssh": Ssh}).sync

    assert sync("code/run.yaml") == ["code/run.yaml", "code/a.py", "code/judge.py"]
    assert sync("code") == ["code"] and sync() == []
    archive = make_archive(sync("code/run.yaml"), None, folder / "x.tar.gz")
    assert names(archive) == ["code/a.py", "code/judge.py", "code/run.yaml"]


def test_a_directory_without_git(folder):
    archive = make_archive(["code"], None, folder / "x.tar.gz")
    assert names(archive) == ["code/a.py", "code/big.log", "code/link", "code/run.sh"]
    with tarfile.open(archive.path) as tar:
        assert tar.getmember("code/run.sh").mode & 0o111 and tar.getmember("code/link").linkname == "a.py"
        assert {member.uname for member in tar} == {""}


@needs_git
def test_git_says_what_belongs_to_a_repository(folder):
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text("*.log\n__pycache__/\n")
    subprocess.run(["git", "add", "code/a.py"], check=True)
    (folder / "code" / "new.py").write_text("not added yet")
    assert names(make_archive(["code"], None, folder / "x.tar.gz")) == [
        f"code/{name}" for name in ("a.py", "link", "new.py", "run.sh")
    ]


@needs_git
def test_repositories_within_a_repository_come_with_it(folder):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    def repository(path):
        (folder / path / "lib").mkdir(parents=True)
        (folder / path / "lib" / "tracked.py").touch()
        (folder / path / "new.py").touch()
        (folder / path / "big.log").touch()
        (folder / path / ".gitignore").write_text("*.log\n")
        git("init", "-q", path)
        git("-C", path, "add", "lib", ".gitignore")
        git("-C", path, "commit", "-qm", "x")

    git("init", "-q")
    for path in ("code/submodule", "code/clone", "code/clone/within", "code/not_fetched"):
        repository(path)
    git("add", "code/submodule", "code/not_fetched")
    shutil.rmtree(folder / "code" / "not_fetched")
    (folder / "code" / "not_fetched").mkdir()
    files = (".gitignore", "lib/tracked.py", "new.py")
    for given, path in (("code", ""), (".", ""), ("code/submodule", "submodule/"), ("code/clone/lib", "clone/lib/")):
        wanted = [f"{each}/{name}" for each in ("submodule", "clone", "clone/within") for name in files]
        wanted += ["a.py", "big.log", "link", "run.sh", "__pycache__/a.pyc"]
        archive = make_archive([given], None, folder.parent / "x.tar.gz")
        assert names(archive) == sorted(f"code/{name}" for name in wanted if name.startswith(path)), given
        assert archive.count == len(names(archive))
    assert list(files_of("code/not_fetched")) == []


@needs_git
@pytest.mark.parametrize("nested", [True, False])
def test_the_configuration_of_a_repository_is_somebody_elses(folder, nested):
    """``core.fsmonitor`` is a command that git runs; ``core.worktree`` leads to files elsewhere."""
    place = folder / "code" / "theirs" if nested else folder
    (place / "lib").mkdir(parents=True)
    (place / "lib" / "mine.py").touch()
    (place / "ignored.py").touch()
    (place / ".gitignore").write_text("ignored.py\n/kept.py\n")
    (place / "kept.py").touch()
    made = folder.parent / "made"
    hook = folder.parent / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {made}\n")
    hook.chmod(0o755)

    def git(*words):
        subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True)

    if nested:
        subprocess.run(["git", "init", "-q"], check=True)
    git("init", "-q")
    git("add", "-f", "kept.py")
    (place / ".git" / "info" / "exclude").write_text("excluded.py\n")
    (place / "excluded.py").touch()
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "core.editor", "diff.external"):
        git("config", key, str(hook))
    git("config", "core.worktree", str(folder.parent))
    git("config", "core.excludesFile", str(folder.parent / "nothing"))
    (folder.parent / "secret").touch()
    prefix = "code/theirs" if nested else "."
    listed = {os.path.relpath(name, prefix) for name in files_of(prefix)}
    assert {"lib/mine.py", "kept.py", ".gitignore"} <= listed
    assert not listed & {"ignored.py", "excluded.py", "../secret"}
    assert not made.exists()


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


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"


def test_keys_and_passwords_are_left_out_and_named(folder):
    secrets = {
        ".env": "TOKEN=x", ".env.local": "TOKEN=x", ".netrc": "machine x", "tls/server.pem": "x", "id_ed25519": "x",
        ".ssh/config": "x", ".aws/credentials": "x", ".config/gcloud/anything": "x", "deploy": KEY,
        "adc.json": "x", "client_secret_1.json": "x", "kaggle.json": "x", ".pgpass": "x", "wandb/settings": "x",
        "mine.json": '{"type": "authorized_user", "refresh_token": "1//x"}',
        "robot.json": '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\nAAAA"}',
    }  # fmt: skip
    for name, text in secrets.items():
        (folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "code" / name).write_text(text)
    (folder / "code" / "link_to_key").symlink_to(".ssh/id_rsa")
    (folder / "code" / "test_keys.py").write_text(f"KEY = {KEY!r}")  # is about keys, and holds none
    (folder / "code" / "data.json").write_text('{"private_key": null, "refresh_token": ""}')
    for given in (["code"], ["."], ["code/.env", *(f"code/{name}" for name in secrets), "code"]):
        archive = make_archive(given, None, folder.parent / "x.tar.gz")
        assert names(archive) == [
            f"code/{name}" for name in ("a.py", "big.log", "data.json", "link", "run.sh", "test_keys.py")
        ]
    assert set(archive.left_out) == {f"code/{name}" for name in (*secrets, "link_to_key")}
    assert "leaves out what looks like keys or passwords: code/.aws/credentials, " in archive.warning()
    assert "and 9 more. Give the job its secrets with --env_file" in archive.warning()
    assert make_archive(["code/a.py"], None, folder / "x.tar.gz").warning() == ""


@pytest.mark.parametrize("target", ["/etc/passwd", "../../elsewhere"])
def test_a_link_out_of_the_directory_is_refused_before_anything_is_sent(folder, target):
    (folder / "code" / "far").symlink_to(target)
    with pytest.raises(ConfigError, match=f"code/far is a link to {target}, which is outside of .*relative path"):
        make_archive(["code"], None, folder / "x.tar.gz")
    assert not (folder / "x.tar.gz").exists()


def test_a_file_with_two_names_is_there_under_both(folder):
    (folder / "code" / "second.py").hardlink_to(folder / "code" / "a.py")
    with tarfile.open(make_archive(["code"], None, folder / "x.tar.gz").path) as tar:
        assert tar.extractfile("code/second.py").read() == tar.extractfile("code/a.py").read() == b"a"
