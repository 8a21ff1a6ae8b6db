"""One door for URLs: what is refused, and that nothing else opens any."""

import ast
import json
import os
from pathlib import Path

import pytest

from lockstep.batch_inference.row_files import RemoteRows
from lockstep.doctor.needs import check_read, check_written
from lockstep.errors import ConfigError, LockstepError
from lockstep.models import fingerprint, read_hf_config
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.save_target import save_target
from lockstep.text import load_tokenizer, read_prompts
from lockstep.training import saved_model
from lockstep.training.checkpoints.checkpoint import bring_files
from lockstep.training.data.records import list_files
from lockstep.urls import check_bare_name, check_links, check_url, checkpoint_path, url_to_fs
from tests.sources import sources


@pytest.mark.parametrize(
    "url",
    [
        "reference::http://localhost/ref.json",
        "filecache::gs://bucket/a",
        "/tmp/a::/tmp/b",
        "reference://ref.json",
        "data:text/plain,a",
        "ssh://host/a",
        "github://org:repo@main/a",
        "REFERENCE://a",
        "jinja2://a",
    ],
)
def test_chains_and_other_protocols_are_refused(url):
    with pytest.raises(ConfigError, match="is a chain of file systems|has the protocol"):
        url_to_fs(url)
    with pytest.raises(ConfigError, match="is a chain of file systems|has the protocol"):
        checkpoint_path(url)


@pytest.mark.parametrize(
    "url", ["runs/a", "/a b", "file:///a", "memory://a", "gs://b/*.jsonl", "hf://datasets/a/b", "c:/a"]
)
def test_paths_and_the_protocols_of_the_list_pass(url):
    assert check_url(url) == check_url(Path(url) if "://" not in url else url) == url


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl' is a pipe, .*must be a file"):
        url_to_fs(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl is a pipe or a device: .* Check data\.train_urls"):
        list_files(str(tmp_path / "*.jsonl"), "data.train_urls")


def test_the_bucket_of_a_shipped_configuration_is_named_before_anything_is_asked_of_it():
    with pytest.raises(ConfigError, match=r"'gs://YOUR_BUCKET/x' has YOUR_BUCKET .* Put the name of your bucket there"):
        url_to_fs("gs://YOUR_BUCKET/x")


def test_a_checkpoint_is_where_its_library_can_be():
    """``etils.epath`` takes other protocols for local paths: ``memory://run`` became a directory ``memory:``."""
    with pytest.raises(ConfigError, match="checkpoints cannot be at 'memory://run': give a local directory, or"):
        checkpoint_path("memory://run")
    assert str(checkpoint_path("gs://bucket/run")) == "gs://bucket/run" and checkpoint_path("run").is_absolute()
    with pytest.raises(ConfigError, match=r"checkpoints cannot be at '/a/b\\udcff', whose name is not UTF-8"):
        checkpoint_path(os.fsdecode(b"/a/b\xff"))


@pytest.fixture
def attack(tmp_path):
    """A URL whose template runs a command where fsspec opens it, and the file that the command makes."""
    made = tmp_path / "made"
    command = "{{ cycler.__init__.__globals__.os.system('touch " + str(made) + "') }}"
    reference = tmp_path / "ref.json"
    reference.write_text(json.dumps({"version": 1, "templates": {"t": command}, "refs": {"a": ["{{t}}"]}}))
    return f"reference::file://{reference}", made


def test_the_attack_works_where_the_door_is_left_out(attack):
    import fsspec

    sandbox = pytest.importorskip("jinja2.sandbox")
    url, made = attack
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.ls(path)
    except sandbox.SecurityError:
        pytest.skip("this version of fsspec renders templates in a sandbox")
    assert made.exists(), "this test file proves nothing: its attack does not work"


@pytest.mark.parametrize(
    "open_it",
    [
        load_tokenizer,
        lambda url: read_prompts(f"{url}.jsonl"),
        lambda url: list_files(url, "data.train_urls"),
        read_hf_config,
        fingerprint,
        CheckpointFiles,
        saved_model,
        lambda url: save_target(f"{url}://", "token"),
        lambda url: RemoteRows(url, 0),
        lambda url: bring_files(url, Path("nowhere"), ["name"]),
        lambda url: raise_found(check_read(url)),
        lambda url: raise_found(check_written(url)),
    ],
)
def test_no_way_in_runs_what_a_url_brings(attack, open_it):
    url, made = attack
    with pytest.raises(LockstepError, match="is a chain of file systems"):
        open_it(url)
    assert not made.exists()


def raise_found(finding):
    assert finding.fix
    raise LockstepError(finding.text)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "..\\a", "a\0", "a::b", None, 1, ["a"]])
def test_a_name_is_of_a_file_beside(name):
    assert check_bare_name("arrays-1a2b", "here") == "arrays-1a2b"
    with pytest.raises(ConfigError, match="here names .* which is not the name of a file beside it"):
        check_bare_name(name, "here")


def test_a_dataset_names_files_of_its_own_directory(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(ConfigError, match=r"state\.json names '\.\./secret\.arrow'"):
        list_files(str(tmp_path), "data.train_urls")


def test_a_directory_that_is_written_to_has_no_link_that_leads_out(tmp_path):
    run = tmp_path / "runs" / "mine"
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "wandb" / "offline-run-2" / "logs").mkdir(parents=True)
    (run / "wandb" / "offline-run-2" / "logs" / "debug-core.log").symlink_to(tmp_path / "cache")  # as W&B does
    check_links(run)
    check_links(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(run)
    check_links(tmp_path / "link")  # the directory itself is the caller's choice
    (run / "wandb" / "run-1" / "logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run-1/logs is a link that leads out of .*/mine \(to '.*elsewhere'\)"):
        check_links(tmp_path / "link")


OPENS = (
    "fsspec.open",
    "url_to_fs",
    "fsspec.filesystem",
    "get_fs_token_paths",
    "get_mapper",
    "UPath",
    "epath.Path",
    "urlopen",
    "urlretrieve",
    "build_opener",
    "HTTPConnection",
    "HTTPSConnection",
)
"""What opens URLs; ``url_to_fs`` is ours where it is imported from lockstep.urls."""


def opened(source: str) -> set[str]:
    """What a source text uses that opens URLs."""
    tree = ast.parse(source)
    ours = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep.urls"
        for alias in node.names
    }
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)} - ours
    used |= {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - {f"lockstep.urls.{name}" for name in ours}
    return {each for each in used if any(one in f"{each}." for one in OPENS)}


def test_nothing_else_opens_urls():
    wrong = {
        name: calls
        for name, text in sources("|".join(call.partition(".")[0] for call in OPENS)).items()
        if name != "urls.py" and (calls := opened(text))
    }
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import fsspec\nfsspec.open(a)",
        "import fsspec as f\nf.core.url_to_fs(a)",
        "from fsspec.core import url_to_fs",
        "from fsspec import open",
        "from upath import UPath",
        "def f():\n    from etils import epath\n    epath.Path(a)",
        "urllib.request.urlopen(a)",
    ],
)
def test_another_way_in_is_seen(source):
    assert opened(source)
    assert not opened("from lockstep.urls import url_to_fs\nurl_to_fs(a)")
