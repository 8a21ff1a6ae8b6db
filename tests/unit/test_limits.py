"""Limits of what others wrote: every way to read a whole file has one."""

import ast
import os

import fsspec
import pytest

from lockstep.batch_inference.row_files import MANIFEST, check_manifest
from lockstep.errors import ConfigError
from lockstep.hosts.lease import LEASE, Lease
from lockstep.limits import FILE_BYTES, TOKENIZER_BYTES, check_regular, read_object, read_objects, read_small
from lockstep.models import read_hf_config
from lockstep.models.hf.files import INDEX_NAME, CheckpointFiles
from lockstep.text import load_tokenizer
from lockstep.training.checkpoints.checkpoint import METADATA, CheckpointDirectory
from lockstep.training.checkpoints.config import resumable_base
from lockstep.training.data.chunk_builder import read_chunk
from lockstep.training.data.records import list_files
from lockstep.training.data.token_cache import read_metadata
from lockstep.urls import url_to_fs
from tests.sources import sources

LOCAL = fsspec.filesystem("file")


def enlarge(path, size):
    """Make a file of a size that takes no place on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


READERS = {
    "read_small": read_small,
    "read_object": lambda path: read_object(LOCAL, str(path)),
    "read_objects": lambda path: read_objects(LOCAL, [str(path)]),
    "check_regular": check_regular,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_no_file_or_has_no_end_is_refused_before_it_is_read(tmp_path, reader):
    read = READERS[reader]
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(ConfigError, match="is a directory, a pipe or a device"):
            read(path)
    enlarge(tmp_path / "config.json", FILE_BYTES + 1)
    with pytest.raises(ConfigError, match=r"config\.json has 67,108,865 bytes; at most 67,108,864 are read"):
        read(tmp_path / "config.json")
    (tmp_path / "link").symlink_to(tmp_path / "small")
    (tmp_path / "small").write_bytes(b"{}")
    assert read(tmp_path / "link") in (b"{}", [b"{}"], None)


def test_an_object_of_a_bucket_has_the_same_limits():
    memory = fsspec.filesystem("memory")
    memory.pipe({"/limits/small": b"{}", "/limits/large": b"x" * 11})
    try:
        assert read_object(memory, "/limits/small", 10) == b"{}"
        assert read_objects(memory, ["/limits/small"] * 2, 10) == [b"{}", b"{}"]
        for read, path in ((read_object, "/limits/large"), (read_objects, ["/limits/large"])):
            with pytest.raises(ConfigError, match="/limits/large has 11 bytes; at most 10 are read"):
                read(memory, path, 10)
    finally:
        memory.rm("/limits", recursive=True)


OPENERS = {
    "config.json": read_hf_config,
    INDEX_NAME: CheckpointFiles,
    "tokenizer_config.json": load_tokenizer,
    "resumable.json": resumable_base,
    "state.json": lambda path: list_files(str(path), "data.train_urls"),
    "metadata.json": lambda path: read_metadata(*url_to_fs(path)),
    "chunk-00000.json": lambda path: read_chunk(*url_to_fs(path), 0),
    f"step-3/{METADATA}": lambda path: CheckpointDirectory(str(path)).metadata(3),
    MANIFEST: lambda path: check_manifest(path, {}, force=True),
    LEASE: lambda path: Lease(path).take(),
}


@pytest.mark.parametrize("what", ["too large", "a pipe"])
@pytest.mark.parametrize("name", OPENERS)
def test_whatever_reads_a_file_of_somebody_elses_has_the_limit(tmp_path, name, what):
    place = tmp_path / name
    if what == "too large":
        enlarge(place, FILE_BYTES + 1)
        text = "at most 67,108,864 are read"
    else:
        place.parent.mkdir(exist_ok=True)
        os.mkfifo(place)
        text = "a pipe or a device"
        if name == "resumable.json":  # one that is no file counts as none
            assert resumable_base(tmp_path) is None
            return
    with pytest.raises(ConfigError, match=text):
        OPENERS[name](tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer.model", "chat_template.jinja"])
def test_a_tokenizer_is_refused_before_its_library_reads_it_whole(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is a directory, a pipe or a device"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    enlarge(tmp_path / name, TOKENIZER_BYTES + 1)
    with pytest.raises(ConfigError, match=f"{name} has 536,870,913 bytes"):
        load_tokenizer(tmp_path)


WHOLE = {"read_bytes", "read_text", "cat_file", "cat_ranges", "cat", "load", "readlines"}


def whole_reads(source: str) -> set[str]:
    """What a source text calls that reads a whole file."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, last = ast.unparse(call.func), getattr(call.func, "attr", getattr(call.func, "id", ""))
        has_end = len(call.args) > 1 or any(each.arg == "end" for each in call.keywords)
        if (last == "cat_file" and not has_end) or (last == "read" and not call.args and not call.keywords):
            found.add(name)
        elif last in WHOLE - {"cat_file", "load"} or name in ("json.load", "np.load", "tomllib.load", "yaml.load"):
            found.add(name)
    return found


OWN = "of the package, or just written by this process"
KERNEL = "of this machine's kernel"
ROWS = "rows, all of which are on the page or in the table"
ALLOWED = {
    "batch_inference/row_files.py": {"file.read": "the rows since the last upload"},
    "check/run.py": {
        "(folder / 'page.css').read_text": OWN,
        "(folder / 'page.html.j2').read_text": OWN,
        "follower.read": OWN,
        "reader.read": OWN,
    },
    "hosts/config.py": {"path.read_bytes": OWN},
    "hosts/lease.py": {
        "Path('/proc/sys/kernel/random/boot_id').read_text": KERNEL,
        "Path(f'/proc/{pid}/stat').read_text": KERNEL,
    },
    "hosts/liveness.py": {"Path(folder, name).read_text": KERNEL},
    "limits.py": {"filesystem.cat_file": "its size was looked at", "filesystem.cat_ranges": "up to the limit"},
    "job_key.py": {"(directory / f'{part}.pem').read_text": OWN},
    "main/demo.py": {"(importlib.resources.files('lockstep.main') / 'demo.yaml').read_text": OWN},
    "doctor/layout_rounds.py": {"(self._directory / layout / 'samples.jsonl').read_text": OWN},
    "doctor/machine.py": {"Path(path).read_text": KERNEL},
    "doctor/needs.py": {"filesystem.cat_file": OWN},
    "xla/compiler.py": {"json.load": "the user's own cache"},
    "plan/workload.py": {"path.read_text": "a configuration that was read within its limit"},
    "configuration/yaml_values.py": {"yaml.load": "a text"},
    "models/hf/fingerprints.py": {"place[0].read_bytes": "a piece of a tensor"},
    "models/hf/save_target.py": {"file.read_bytes": OWN},
    "placement/device/memory.py": {"(_CGROUP / name).read_text": KERNEL, "_MEMINFO.read_text": KERNEL},
    "placement/device/torn_cache.py": {"path.read_bytes": "the user's own cache"},
    "report/jsonl.py": {"Path(path).read_bytes": ROWS},
    "report/judge.py": {"error.read": "a reply within its limit"},
    "report/page.py": {
        "(folder / 'page.css').read_text": OWN,
        "(folder / 'page.html.j2').read_text": OWN,
        "(folder / name).read_text": OWN,
    },
    "report/tail.py": {"file.read": ROWS},
    "text/tokenizer.py": {"file.read_text": OWN},
    "training/checkpoints/arrays.py": {"self._open[name][index].read": "its chunks were looked at"},
    "training/checkpoints/checkpoint.py": {"path.read_bytes": "its size was looked at"},
    "training/checkpoints/grace.py": {"file.read_bytes": OWN},
    "training/checkpoints/saved_model.py": {"file.read_bytes": OWN},
    "training/data/records.py": {"fs.cat_file": "of at most `WHOLE_BYTES`"},
    "training/data/token_cache.py": {"self._fs.cat_ranges": "rows of a batch, or a cache within `RESIDENT_BYTES`"},
}
"""Every other call that reads all of a file: why its size is known. The launcher reads its own files, tests theirs."""


def test_another_way_to_read_all_is_seen():
    for source in (
        "Path(a).read_bytes()",
        "open(a).read()",
        "fs.cat_file(a)",
        "json.load(a)",
        "fs.cat_ranges(a, b, c)",
    ):
        assert whole_reads(source), source
    assert not whole_reads("fs.cat_file(a, 0, 10)\nfile.read(10)\nfs.cat_file(a, start=0, end=b)")


def test_nothing_else_reads_whole_files():
    files = sources(rf"\b({'|'.join(WHOLE)}|load|read)\b")
    calls = {name: whole_reads(text) for name, text in files.items() if not name.startswith(("launch/", "testing/"))}
    calls = {name: reads for name, reads in calls.items() if reads}
    assert calls == {name: set(reasons) for name, reasons in ALLOWED.items()}
