"""What ``--dry-run`` prints for workers, run as the shell that it is pasted into."""

import shlex
import subprocess

from lockstep.launch import main


def test_a_directory_of_any_name_is_one_word_of_the_workers_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for workdir in ("~/a b; touch pwned", "$(touch pwned)", "~"):
        words = ["--backend", "ssh", "--hosts", "one", "--workdir", workdir, "--venv", "~/v; touch pwned", "--dry-run"]
        assert main([*words, "--", "pwd"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "REQUIRE_JAX_PROCESS_COUNT" in line]
        command = shlex.split(line.removesuffix(" < /dev/null"))[-1]
        folder = tmp_path / "home" / workdir.removeprefix("~").removeprefix("/")
        folder.mkdir(exist_ok=True)
        environment = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["sh", "-c", command], env=environment, cwd=tmp_path / "home", capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == (f"{folder}\n".replace("/\n", "\n"), "")
        assert not list(tmp_path.rglob("pwned"))


def test_keys_are_not_packed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for name in (".env", "a.py"):
        (tmp_path / "code" / name).write_text("x")
    assert main(["--backend", "ssh", "--hosts", "one", "--sync", ".", "--dry-run", "--", "x"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tar ")]
    packed = line.partition(" | ")[0]
    listed = subprocess.run(["sh", "-c", f"{packed} | tar -tzf -"], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["./", "./code/", "./code/a.py"]
