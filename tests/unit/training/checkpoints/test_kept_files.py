"""Files of a run directory come back from beside the checkpoints."""

from lockstep.training import bring_files, keep_files


def test_what_was_kept_comes_back_on_another_machine(tmp_path):
    first, second, checkpoints = tmp_path / "first", tmp_path / "second", tmp_path / "bucket" / "run"
    first.mkdir()
    second.mkdir()
    bring_files(str(checkpoints), first, ["a", "b"])
    assert list(first.iterdir()) == [] and not checkpoints.exists()
    keep_files(str(checkpoints), first, ["a", "b"])
    for text in ("1", "2"):
        (first / "a").write_text(text)
        keep_files(str(checkpoints), first, ["a", "b"])
    bring_files(str(checkpoints), second, ["a", "b"])
    assert {path.name: path.read_text() for path in second.iterdir()} == {"a": "2"}
    (second / "a").write_text("newer here")
    bring_files(str(checkpoints), second, ["a", "b"])
    assert (second / "a").read_text() == "newer here"
