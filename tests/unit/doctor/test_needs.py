"""Settings of doctor that cannot work say why; buckets, W&B and the tokenizer, against servers on this machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.doctor.finding import wait_for_all
from lockstep.doctor.needs import (
    DoctorConfig,
    RunNeeds,
    begin_checks,
    check_checkpoint,
    check_read,
    check_tokenizer,
    check_wandb,
    check_written,
    read_needs,
)
from lockstep.errors import ConfigError
from lockstep.models import as_trainable, load_hf, read_hf_config, save_hf
from lockstep.placement import make_mesh
from tests import fake_gcs, tiny
from tests.http_replies import serving


def test_seconds_are_positive():
    with pytest.raises(ConfigError, match=r"reach_s is 0; it must be more than 0 seconds"):
        DoctorConfig(reach_s=0)


def test_a_calibration_needs_a_measurement():
    with pytest.raises(ConfigError, match="calibrate is given and measure is false"):
        DoctorConfig(calibrate="chip.json", measure=False)


VALUES = {
    "trainer": {
        "tracker": [{"type": "jsonl"}, {"type": "wandb", "project": "p", "mode": "offline"}],
        "checkpointer": {"base_path": "gs://out/checkpoints"},
        "mesh_shape": "1,-1,2",
        "log_dir": "/logs",
        "distributed": {"timeout_s": 60, "process_id": 1},
    },
    "data": {"train_urls": ["gs://in/train-*.jsonl.gz", "data/local.jsonl"], "validation_urls": ["gs://in/val.jsonl"]},
    "initialize_from_hf": "gs://models/llama",
    "tokenizer": "gs://models/llama",
    "hf_save_path": "gs://out/hf",
    "inference_eval": {"prompts": "gs://in/prompts.jsonl"},
}


def test_urls_go_where_they_are_used():
    needs = read_needs(DoctorConfig(buckets=["gs://mine"]), VALUES)
    assert needs.written == ("gs://mine", "gs://out/checkpoints", "gs://out/hf")
    assert needs.read == ("gs://in/train-*.jsonl.gz", "gs://in/val.jsonl", "gs://in/prompts.jsonl")
    assert needs.tokenizer == needs.checkpoint == "gs://models/llama"
    assert needs.wandb is not None and needs.wandb["project"] == "p"
    assert (needs.mesh_shape, needs.log_dir) == ("1,-1,2", "/logs")


def test_what_a_run_makes_is_written_and_neither_texts_nor_services_are_data():
    needs = read_needs(
        DoctorConfig(),
        {
            "trainer": {"tracker": {"type": "tensorboard", "logdir": "gs://out/tb"}, "log_dir": "gs://out/runs"},
            "data": {
                "train_urls": [{"url": "gs://in/a.jsonl", "name": "https://a.example"}],
                "validation_urls": ["hf://datasets/b/val.parquet"],
                "cache_dir": "gs://out/cache",
                "system_prompt": "https://example.org is a site.",
            },
            "inference_eval": {
                "judge": {"base_url": "https://api.example.org/v1"},
                "prompts": [
                    "https://example.org",
                    {"messages": [{"role": "user", "content": "https://example.org"}], "url": "https://source.example"},
                ],
            },
            "samples": {"prompts": "gs://in/prompts.jsonl", "checkpoint_path": "gs://in/step-10"},
        },
    )
    assert needs.written == ("gs://out/tb", "gs://out/cache")
    assert needs.read == (
        "gs://in/a.jsonl", "hf://datasets/b/val.parquet", "gs://in/prompts.jsonl", "gs://in/step-10"
    )  # fmt: skip


def test_a_token_cache_that_is_not_there_yet_is_sound(tmp_path):
    url = f"file://{tmp_path}/new/token-cache"
    needs = read_needs(DoctorConfig(), {"data": {"cache_dir": url}})
    (found,) = wait_for_all(begin_checks(needs), 60)
    assert (found.name, found.outcome) == (f"bucket {url}", "ok"), found


def test_the_digest_leaves_out_what_each_process_is_told():
    other = {**VALUES, "trainer": {**VALUES["trainer"], "distributed": {"process_id": 2}}}
    changed = {**VALUES, "tokenizer": "other"}
    first, second, third = (read_needs(DoctorConfig(), one).config_digest for one in (VALUES, other, changed))
    assert first == second != third


def test_nothing_is_asked_without_a_configuration():
    assert read_needs(DoctorConfig(), {}) == RunNeeds()


@pytest.mark.parametrize("path", sorted(Path("config").rglob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_configurations_are_read(path):
    values = yaml.safe_load(path.read_text())
    needs = read_needs(DoctorConfig(), values)
    assert needs.tokenizer is not None or "checkpoint_path" in values
    assert all("://" in url for url in (*needs.written, *needs.read))


@pytest.fixture
def bucket(monkeypatch):
    with fake_gcs.serve_here(monkeypatch) as served:
        yield served


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_directory_is_written_read_and_left_as_it_was(tmp_path):
    found = check_written(str(tmp_path / "new"))
    assert found.outcome == "ok" and list((tmp_path / "new").iterdir()) == []


def test_a_bucket_is_written_to_and_cleaned(bucket):
    found = check_written("gs://bucket/checkpoints")
    assert found.outcome == "ok", found
    assert bucket.objects == {}


def test_a_bucket_that_refuses_says_what_to_give(bucket):
    bucket.refuse = "no right to list"
    found = check_read("gs://bucket/data.jsonl")
    assert found.outcome == "fix" and "Storage Object Admin" in found.fix


def test_what_is_read_must_be_there(bucket, tmp_path):
    bucket.write("bucket/train-0.jsonl", b"{}")
    assert check_read("gs://bucket/train-*.jsonl").text == "1 file or directories of this name"
    assert check_read(f"file://{tmp_path}/no.jsonl").text == "there is nothing of this name."


def test_a_protocol_without_a_package_is_a_finding():
    found = check_written("nosuch://bucket")
    assert found.outcome == "fix" and "nosuch" in found.text


def test_the_tokenizer_and_the_checkpoint_are_read_as_by_a_run(tmp_path):
    assert check_tokenizer("data/demo/tokenizer").outcome == "ok"
    found = check_tokenizer(str(tmp_path))
    assert found.outcome == "fix" and "holds none of tokenizer.json" in found.text
    assert check_checkpoint(str(tmp_path)).outcome == "fix"


def test_a_checkpoint_is_read_up_to_the_headers_of_its_weights(tmp_path):
    """As by `load_hf`, in a process that has no devices yet: doctor looks before it joins the job."""
    path = tmp_path / "model"
    save_hf(as_trainable(tiny.CONFIG, tiny.placed_weights(make_mesh("auto"), vocab=64)), path)
    code = "import sys; from lockstep.doctor.needs import check_checkpoint as check; print(check(sys.argv[1]).text)"
    code += "; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout == f"{path}: {read_hf_config(path)['model_type']}\n", done.stderr
    file = path / "model.safetensors"
    whole = file.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[:size] + bytes(len(whole) - size))  # of the weights nothing is left
    assert check_checkpoint(str(path)).outcome == "ok"
    file.write_bytes(whole.replace(b"layers.1.mlp.down_proj", b"layers.1.mlp.dawn_proj"))
    damaged = check_checkpoint(str(path))
    assert damaged.outcome == "fix" and "layers.1.mlp.down_proj" in damaged.text
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj"):
        load_hf(path, make_mesh("auto"))
    file.write_bytes(whole[: len(whole) // 2])
    half = check_checkpoint(str(path))
    assert half.outcome == "fix" and f"it has {len(whole) // 2:,} bytes and needs" in half.text


def of_viewer(viewer):
    return 200, {"data": {"viewer": viewer}}


@pytest.fixture
def wandb(monkeypatch):
    with serving(of_viewer({"username": "ada"})) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url.removesuffix("v1"))
        monkeypatch.setenv("WANDB_API_KEY", "hush-hush")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        yield server


def test_wandb_says_whose_the_key_is(wandb):
    found = check_wandb({}, 5)
    assert found.outcome == "ok" and found.text.endswith("answers; logged in as ada")
    assert [(path, headers["Authorization"]) for path, headers, _ in wandb.asked] == [
        ("/graphql", "Basic YXBpOmh1c2gtaHVzaA==")
    ]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (of_viewer(None), "does not know the key"),
        ((401, b"no"), "refuses the key (401)"),
        ((500, b"no"), "answers 500"),
    ],
)
def test_a_key_that_is_no_good_is_found_and_not_shown(wandb, reply, text):
    wandb.replies = [reply]
    found = check_wandb({}, 5)
    assert found.outcome == "fix" and text in found.text
    assert "hush" not in str(found)


@pytest.mark.parametrize("status", [302, 307])
def test_the_key_follows_no_redirect(wandb, status):
    with serving((200, b"")) as other:
        wandb.replies = [(status, b"no", {"Location": other.url})]
        found = check_wandb({}, 5)
    assert not other.asked and len(wandb.asked) == 1
    assert found.outcome == "fix" and f"answers {status}" in found.text


def test_wandb_that_is_not_installed(wandb, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    found = check_wandb({}, 5)
    assert found.outcome == "fix" and "jax-lockstep[wandb]" in found.fix and not wandb.asked


def test_wandb_without_a_network_or_a_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    found = check_wandb({}, 5)
    assert found.outcome == "fix" and "there is no key" in found.text
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password hush\n")
    (tmp_path / ".netrc").chmod(0o600)
    found = check_wandb({}, 5)
    assert found.outcome == "fix" and "does not answer: URLError" in found.text and "offline" in found.fix
    assert check_wandb({"mode": "offline"}, 5).text == "not asked: mode offline"


@pytest.mark.slow
def test_all_of_it_at_once_within_the_time(monkeypatch, tmp_path):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    needs = RunNeeds(
        written=("gs://bucket/out", str(tmp_path)), read=("gs://bucket/in",), tokenizer="data/demo/tokenizer"
    )
    check_tokenizer(needs.tokenizer)  # what it imports takes a slow machine longer than it waits
    findings = wait_for_all(begin_checks(needs), 6.0)
    assert {finding.name: finding.outcome for finding in findings} == {
        "bucket gs://bucket/out": "fix",
        f"bucket {tmp_path}": "ok",
        "data gs://bucket/in": "fix",
        "tokenizer": "ok",
    }
