"""Logs that grow."""

from lockstep.launch.console import Console
from lockstep.launch.followed_files import FollowedFiles


def test_whole_lines_are_shown_once_by_attempt_and_worker(tmp_path, capfdbinary):
    files = FollowedFiles(tmp_path, Console())
    files.read(last=False)
    for name, text in {"attempt-1/worker-10.log": "ten\n", "attempt-1/worker-2.log": "two\npart"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files.read(last=False)
    assert capfdbinary.readouterr().out == b"[2] two\n[10] ten\n"
    with (tmp_path / "attempt-1/worker-2.log").open("a") as log:
        log.write("ly\nno end")
    files.read(last=False)
    assert capfdbinary.readouterr().out == b"[2] partly\n"
    files.read(last=True)
    files.read(last=True)
    assert capfdbinary.readouterr().out == b"[2] no end\n"
