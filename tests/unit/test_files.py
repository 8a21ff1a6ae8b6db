"""One door for writing: no link is followed, and nothing else opens a file to write."""

import ast
import contextlib
import errno
import json
import os
import re
from unittest import mock

import pytest

from lockstep.batch_inference.row_files import MANIFEST, write_manifest
from lockstep.files import advice_of, check_file, in_place, new_file, private, write_file
from lockstep.launch.backend import Console
from lockstep.launch.started_job import keep
from lockstep.placement.device.calibration import save_calibration
from lockstep.report.jsonl import append_jsonl, drop_later, repair_jsonl
from lockstep.report.page import write_page
from lockstep.report.row_formats import write_parquet
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory, keep_files
from lockstep.training.checkpoints.config import write_resumable
from tests.sources import sources


@pytest.fixture
def victim(tmp_path):
    """A file elsewhere, to which a link leads."""
    file = tmp_path / "elsewhere" / ".bashrc"
    file.parent.mkdir()
    file.write_text("mine\n")
    return file


def test_a_new_file_takes_the_place_of_a_link_as_a_whole(tmp_path, victim):
    place = tmp_path / "metrics.json"
    place.symlink_to(victim)
    with new_file(place, fsync=True) as file:
        file.write(b"1")
        assert place.is_symlink(), "it is written beside its place"
    write_file(tmp_path / "text", "ü")
    assert victim.read_text() == "mine\n"
    assert place.read_bytes() == b"1" and not place.is_symlink() and (tmp_path / "text").read_bytes() == "ü".encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "metrics.json", "text"]


def test_what_fails_leaves_nothing(tmp_path):
    (tmp_path / "a").write_text("before")
    full = rf"No space left on device: '{tmp_path}/a'"
    with pytest.raises(OSError, match=full), new_file(tmp_path / "a"), open("/dev/full", "wb", 0) as device:
        device.write(b"x")
    with pytest.raises(KeyError), new_file(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("place", ["pipe", "link to a pipe", "/dev/null", "/dev/stdout", "/dev/report.html"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, place):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a pipe").symlink_to(tmp_path / "pipe")
    for write in (check_file, lambda path: write_file(path, "")):
        with (
            mock.patch("os.replace", side_effect=AssertionError),  # root could
            pytest.raises(OSError, match="only regular files are written; choose another place"),
        ):
            write(tmp_path / place)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "full"), "Free space there"),
        (OSError(errno.EDQUOT, "full", "a"), "Free space there"),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']"), "Free space"),
        (PermissionError(errno.EACCES, "no", "a"), "Choose a place that this user"),
        (PermissionError(errno.EACCES, "a port"), ""),
        (FileNotFoundError(errno.ENOENT, "a bug of ours", "a"), ""),
        (KeyError("a"), ""),
    ],
)
def test_a_full_disk_and_a_forbidden_place_have_advice(error, advice):
    assert advice_of(error).startswith(advice) and bool(advice_of(error)) == bool(advice)


def test_permissions_are_those_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "open", b"")
        write_file(tmp_path / "secret", b"", 0o600)
        open(tmp_path / "own" / "log", "ab", opener=private).close()
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("open", "secret", "own", "own/log")}
    assert modes == {"open": 0o640, "secret": 0o600, "own": 0o700, "own/log": 0o600}


@pytest.mark.parametrize("opener", [in_place, private])
@pytest.mark.parametrize("mode", ["ab", "wb", "rb+", "xb"])
def test_a_file_in_its_place_is_no_link_and_no_pipe(tmp_path, victim, opener, mode):
    link, dangling, pipe = (tmp_path / name for name in ("link", "dangling", "pipe"))
    link.symlink_to(victim)
    dangling.symlink_to(tmp_path / "elsewhere" / "new")
    os.mkfifo(pipe)
    for place in (link, dangling, pipe):
        with pytest.raises(OSError, match="only regular files are written; choose|File exists"):
            open(place, mode, opener=opener)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(reader)), pytest.raises(OSError, match="regular files|File exists"):
        open(pipe, mode, opener=opener)
    assert victim.read_text() == "mine\n" and os.listdir(victim.parent) == [".bashrc"]


OPENS = {"open", "fdopen", "GzipFile", "ZipFile", "TarFile"}
WRITES = set(
    "write_text write_bytes touch mkstemp NamedTemporaryFile mkfifo mknod symlink symlink_to hardlink_to rename "
    "renames copyfile copytree copy2 move truncate tofile savez savez_compressed save_file save_pretrained to_csv "
    "to_parquet extract extractall ParquetWriter OSFile SummaryWriter start_trace pipe_file put_file get_file "
    "FileHandler".split()
)
OF_MODULES = {"os.replace", "os.link", "shutil.copy", "np.save", "ts.open", "tensorstore.open", "json.dump"}
KNOWN = OPENS | WRITES | {name.rpartition(".")[2] for name in OF_MODULES}


def is_writing(call: ast.Call) -> bool:
    """Whether a call may write a file by another way than `lockstep.files`."""
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last not in KNOWN:
        return False
    name = ast.unparse(call.func)
    if last in WRITES or name in OF_MODULES:
        return True
    if last == "replace" and len(call.args) == 1 and not call.keywords:  # of a path; a text takes two
        return True
    if last not in OPENS or any(ast.unparse(each.value) in ("in_place", "private") for each in call.keywords):
        return False
    if call.args and isinstance(call.args[0], ast.Call) and ast.unparse(call.args[0].func) == "private":
        return False
    if name == "os.open":
        return not set(ast.unparse(call.args[1]).split(" | ")) <= {"os.O_RDONLY", "os.O_NONBLOCK", "os.O_CLOEXEC"}
    rest = [*call.args[0 if isinstance(call.func, ast.Attribute) else 1 :], *(each.value for each in call.keywords)]
    texts = {each.value for word in rest for each in ast.walk(word) if isinstance(each, ast.Constant)}
    modes = {text for text in texts if isinstance(text, str) and re.fullmatch("[rwaxbt+|gz:]{1,4}", text)}
    return any(set(mode) & set("wax+") for mode in modes)


def writing_calls(source: str) -> set[str]:
    """What a source text calls, or imports by name, that writes files."""
    tree = list(ast.walk(ast.parse(source)))
    called = {ast.unparse(node.func) for node in tree if isinstance(node, ast.Call) and is_writing(node)}
    imported = {
        alias.name
        for node in tree
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lockstep")
        for alias in node.names
        if alias.name in WRITES or f"{node.module}.{alias.name}" in OF_MODULES | {"os.open", "io.open"}
    }
    return called | imported


BUCKET, MEMORY, OWN = "no link is in a bucket", "a stream in memory", "into a new directory, or a file of a random name"
CHECKED = "a library's own files, below a run directory whose links `lockstep.urls.check_links` has looked at"
ALLOWED = {
    "batch_inference/row_files.py": {
        "self._filesystem.pipe_file": "an object of a random name",
        "self._filesystem.put_file": BUCKET + "; a file of any size is not read into memory",
    },
    "hosts/lease.py": {
        "os.link": "of a draft of its own, to a name that must be free",
        "self._filesystem.pipe_file": BUCKET,
    },
    "job_key.py": {"(directory / 'index').touch": OWN, "(directory / 'openssl.cnf').write_text": OWN},
    "launch/agent/main.py": {"archive.extractall": "of the launcher; `tarfile.data_filter` refuses what leads out"},
    "launch/agent/supervisor.py": {"os.open": "/dev/null", "os.rename": "of a new directory, to no file"},
    "launch/gke_manifest.py": {"gzip.GzipFile": MEMORY, "tarfile.open": MEMORY},
    "launch/record.py": {"path.rename": "of directories of the launcher's own, into a new one"},
    "launch/setup_vm.py": {"shutil.copy2": OWN},
    "launch/sync.py": {"gzip.GzipFile": OWN, "tarfile.open": OWN},
    "main/cli.py": {"os.open": "/dev/null"},
    "doctor/needs.py": {"filesystem.pipe_file": OWN},
    "models/hf/files.py": {"filesystem.get_file": OWN},
    "models/hf/load.py": {"move": "of an array, between memories"},
    "models/hf/save_target.py": {
        "self._filesystem.open": BUCKET,
        "self._filesystem.pipe_file": BUCKET,
        "shutil.copy2": OWN,
        "shutil.copytree": OWN,
        "replaced.rename": "a link is renamed itself",
        "self._draft.rename": "a link is renamed itself",
        "self._path.rename": "a link is renamed itself",
    },
    "printable.py": {"open": "/dev/null"},
    "report/jsonl.py": {"file.truncate": "opened by `in_place`"},
    "report/row_formats.py": {"pq.ParquetWriter": "into a `new_file`"},
    "report/trackers/tensorboard.py": {"tensorboardX.SummaryWriter": CHECKED},
    "text/loading.py": {"zipfile.ZipFile": MEMORY},
    "text/tokenizer.py": {"tokenizer.save_pretrained": OWN},
    "training/checkpoints/arrays.py": {"tensorstore.open": "to read"},
    "training/checkpoints/checkpoint.py": {"target.write_bytes": BUCKET},
    "training/checkpoints/writers.py": {"ts.open": OWN},
    "training/data/token_cache.py": {"fs.open": BUCKET},
    "training/loop/profiler.py": {"jax.profiler.start_trace": CHECKED, "file.replace": CHECKED},
}
"""Every other call that writes: why it follows no link that somebody else has made."""


def test_nothing_else_writes_files():
    files = sources(rf"\b({'|'.join(KNOWN)})\b")
    calls = {name: found for name, text in files.items() if (found := writing_calls(text))}
    assert calls.pop("files.py") == {"os.open", "open", "os.replace"}
    assert calls == {name: set(reasons) for name, reasons in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "open(a, 'w')",
        "open(a, mode='ab')",
        "open(a, 'ab' if b else 'wb', opener=mine)",
        "Path(a).open('x')",
        "os.open(a, os.O_WRONLY | os.O_CREAT)",
        "Path(a).write_text(b)",
        "path.replace(b)",
        "os.replace(a, b)",
        "from os import replace\nreplace(a, b)",
        "import gzip\ngzip.open(a, 'wt')",
        "from shutil import copyfile",
        "tempfile.mkstemp()",
    ],
)
def test_another_way_to_write_is_seen(source):
    assert writing_calls(source)


@pytest.mark.parametrize(
    "source",
    ["open(a)", "open(a, 'rb')", "text.replace('a', 'b')", "open(a, 'ab', opener=in_place)", "os.open(a, os.O_RDONLY)"],
)
def test_what_writes_nothing_or_by_the_door_passes(source):
    assert not writing_calls(source)


def row(step):
    return {"step": step, "prompt_id": 0, "generation_id": 0, "prompt": "a", "generated_text": "b", "num_tokens": 1}


def convert(name):
    def write(place):
        place.with_name("rows.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(2)))
        write_parquet(place.with_name("rows.jsonl"), place)

    return name, write


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda place: append_jsonl(place, [row(1)])),
        ("metrics.jsonl", repair_jsonl),
        ("samples.jsonl", lambda place: drop_later(place, 1)),
        ("report.html", lambda place: write_page("<p>", place)),
        ("launcher.log", lambda place: Console(log=place).say("started")),
        (MANIFEST, lambda place: write_manifest(place.parent, {"a": 1})),
        ("resumable.json", lambda place: write_resumable(place.parent, "checkpoints")),
        ("metadata.json", lambda place: CheckpointDirectory(str(place.parent)).write_whole(place, b"{}")),
        ("wandb-run.json", lambda place: keep_files(str(place.parent), other_run(place), [place.name])),
        ("chip.json", lambda place: save_calibration(place, chip="TPU v5p", measured="today")),
        ("a.log", lambda place: keep(place, 0, b"output")),
        convert("rows.parquet"),
    ],
)
def test_the_attack_on_each_writer(tmp_path, victim, name, write):
    """A run directory of somebody else's: each file that is written there is a link to one of ours."""
    place = tmp_path / "run" / name
    place.parent.mkdir()
    place.symlink_to(victim)
    try:
        write(place)
    except OSError as error:
        assert "only regular files are written" in str(error)
    else:
        assert not place.is_symlink() and place.is_file()
    assert victim.read_text() == "mine\n" and os.listdir(victim.parent) == [victim.name]


def other_run(place):
    run = place.parents[1] / "other"
    run.mkdir()
    (run / place.name).write_text("{}")
    return run
