"""Loading checkpoints, and what is told meanwhile."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient, digest
from lockstep.models import Qwen3Config, load_config, load_hf
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.load import LoadProgress
from lockstep.placement import COMPUTE_AXES, PARAMETER_AXES, make_mesh
from tests.counted_files import CountedFiles, HangingFiles, SlowFiles
from tests.golden.variants import POSITIONS, VARIANTS
from tests.multiprocess.harness import run_threads

GOLDEN = Path(__file__).parents[3] / "golden"
QUICK = [("llama3", "1,1,1"), ("gemma3", "1,1,1"), ("qwen2", "1,2,2")]
SPLIT = ("deepseek_v3", "qwen3_moe_mixed", "qwen3_next")
"""A latent, experts beside MLPs and a memory, split over four devices. The rest is nightly: on one device the logits of
every family are compared in families/test_families.py."""
OTHERS = sorted({path.parent.name for path in GOLDEN.glob("*/golden.npz")} - {"llama_tied", "qwen2"})


def mesh_of(shape: str, devices: int = 4) -> Mesh:
    return make_mesh(shape, jax.devices()[:devices])


def copy_of(family: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / family, target / family))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("phi3", "1,1,1"), ("llama_tied", "1,2,2"))),
        *(
            pytest.param(family, "1,2,2", marks=pytest.mark.slow if family in SPLIT else pytest.mark.nightly)
            for family in OTHERS
        ),
    ],
)
def test_logits_agree_with_transformers(family: str, shape: str, record_property: Any) -> None:
    golden = np.load(GOLDEN / family / "golden.npz")
    mesh = mesh_of(shape, 1 if shape == "1,1,1" else 4)
    model = load_hf(str(GOLDEN / family), mesh)
    ids = hax.named(golden["input_ids"], ("batch", "position"))
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda m, i: m(i), axis_resources=COMPUTE_AXES)(model, ids)
    difference = float(np.abs(np.asarray(logits.array) - golden["logits"]).max())
    record_property("max_abs_difference", difference)
    assert difference < 1e-4


QUICK_VARIANTS = ("yarn_original_beside", "tied_with_own_head", "qwen3_5_seeing")
SLOW_VARIANTS = (
    "qwen3_moe_fused",
    "yarn_mscale",
    "gemma3_seeing",
    "gemma3_old_spelling",
    "tied_gemma_with_own_head",
    "no_prefix",
    "mixtral_fused",
    "qwen2_moe_fused",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in QUICK_VARIANTS else pytest.mark.slow if name in SLOW_VARIANTS else pytest.mark.nightly,
        )
        for name in VARIANTS
    ],
)
def test_what_people_have_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    VARIANTS[name].write(tmp_path / name)
    golden, mesh = np.load(GOLDEN / VARIANTS[name].family / "golden.npz"), mesh_of("1,1,1", 1)
    model = load_hf(tmp_path / name, mesh)
    ids = hax.named(golden["input_ids"], ("batch", "position"))
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda m, i: m(i), axis_resources=COMPUTE_AXES)(model, ids)
    expected = np.load(GOLDEN / "variants.npz")[name]
    assert float(np.abs(np.asarray(logits.array)[:, POSITIONS] - expected).max()) < 1e-4


def test_mistral_small_is_read_from_beside_its_vision_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it was published: with the names that Gemma 3 has, and an output layer within the language model."""
    text = json.loads((GOLDEN / "mistral" / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = {"vision_tower.patch_conv.weight": np.ones((2, 2), np.float32)}
    for file in (GOLDEN / "mistral").glob("*.safetensors"):
        stored |= {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(stored, tmp_path / "model.safetensors")
    ours, theirs = (load_hf(str(path), mesh_of("1,1,1", 1)) for path in (tmp_path, GOLDEN / "mistral"))
    assert ours.config == theirs.config
    assert all(map(np.array_equal, *map(jax.tree.leaves, (ours, theirs))))
    assert "the vision tower, vision_tower.; prompts are text" in caplog.text


def test_parameters_are_sharded_and_cast() -> None:
    mesh = mesh_of("1,2,2")
    model = load_hf(str(GOLDEN / "qwen2"), mesh, PARAMETER_AXES, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    layer = model.layers.stacked
    assert layer.attention.q.array.sharding.spec == jax.P(None, "fsdp", "tp", None, None)
    assert layer.attention.q_bias is not None
    assert layer.attention.q_bias.array.sharding.spec == jax.P(None, "tp", None, None)
    assert model.embed.array.addressable_shards[0].data.shape == (56, 32)
    whole = load_hf(str(GOLDEN / "qwen2"), mesh_of("1,1,1", 1), PARAMETER_AXES, jnp.bfloat16)
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("mapping", [{"head_size": "tp"}, {"q_heads_per_group": "tp", "layer": "fsdp"}])
def test_any_mapping_gives_the_same_weights(mapping: dict[str, str]) -> None:
    model = load_hf(str(GOLDEN / "llama3"), mesh_of("1,2,2"), mapping)
    whole = load_hf(str(GOLDEN / "llama3"), mesh_of("1,1,1", 1))
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shape", [pytest.param("1,4,1", marks=pytest.mark.slow), "1,2,2", "4,1,1"])
def test_every_byte_is_read_once_however_many_devices_hold_it(shape: str) -> None:
    CountedFiles.bytes_read()
    told: list[tuple[int, int]] = []
    on_read = lambda *counts: told.append(counts)  # noqa: E731
    model = load_hf(f"counted://{GOLDEN}/qwen3", mesh_of(shape), on_read=on_read)
    read, stored = CountedFiles.bytes_read(), sum(leaf.size * 2 for leaf in jax.tree.leaves(model))
    headers = read - stored
    assert 0 < headers < 10_000, "config.json and the header of the one file"
    assert sum(new for new, _ in told) == stored
    assert {total for _, total in told} == {stored}


def load_on_own_device(hosts: Hosts, urls: list[str], timeout_s: float) -> str:
    """Each host loads on a device of its own; returns the bytes of its model, or the error."""
    hosts.timeout_s = timeout_s
    mesh = make_mesh("1,1,1", [jax.devices()[hosts.index]])
    try:
        model = load_hf(urls[hosts.index], mesh, hosts=hosts)
        text = digest(*(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)))
    except PeerError as error:
        text = str(error)
    return text


@pytest.mark.slow
def test_hosts_that_read_slowly_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowFiles.reads.clear()
    monkeypatch.setattr(SlowFiles, "seconds", 0.5)
    timeout_s = 5.0
    results = run_threads(load_on_own_device, 2, [f"{GOLDEN}/mistral", f"slow://{GOLDEN}/mistral"], timeout_s)
    assert results[0] == results[1] and len(results[0]) == 64, results
    assert len(SlowFiles.reads) * SlowFiles.seconds > 2 * timeout_s, "it took longer than any wait may last"


def test_a_host_that_gets_nothing_says_so_on_every_host() -> None:
    HangingFiles.reads.clear()
    HangingFiles.go_on.clear()
    try:
        results = run_threads(load_on_own_device, 2, [f"{GOLDEN}/llama3", f"hanging://{GOLDEN}/llama3"], 2.0)
    finally:
        HangingFiles.go_on.set()
    assert results[0] == results[1]
    expected = r"process 1: HostTimeoutError: nothing of tensor \S+ in \S+/llama3/model\.safetensors.* came for 2 s\."
    assert re.search(expected, results[0]), results


def test_a_file_that_ends_too_early_is_named_with_the_tensor(tmp_path: Path) -> None:
    directory = copy_of("llama3", tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(directory, r"tensor \S+ in \S+/llama3/model\.safetensors cannot be read: .* bytes came where .* Download")


def test_a_given_config_replaces_the_stored_one(tmp_path: Path) -> None:
    config = load_config(str(GOLDEN / "mistral"), max_seq_len=32)
    model = load_hf(str(GOLDEN / "mistral"), mesh_of("1,1,1", 1), config=config)
    assert model.config is config and config.max_seq_len == 32


def test_a_second_copy_of_a_tied_embedding_and_derived_buffers_are_ignored(tmp_path: Path) -> None:
    directory = copy_of("llama_tied", tmp_path)

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    change_tensors(directory, add)
    assert load_hf(str(directory), mesh_of("1,1,1", 1)).lm_head is None


def refused(directory: Path, text: str, **keywords: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        load_hf(str(directory), mesh_of("1,1,1", 1), **keywords)


def test_tensors_that_do_not_fit_are_named_with_file_and_shapes(tmp_path: Path) -> None:
    directory = copy_of("llama3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"

    change_tensors(directory, lambda t: t.update({name: t[name][:30]}))
    refused(
        directory, r"tensor model\.layers\.1\.mlp\.up_proj\.weight in model\.safetensors has shape \(30, 64\), expected"
    )
    change_tensors(directory, lambda t: t.pop(name))
    refused(directory, r"tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \(40, 64\) is missing")
    change_tensors(directory, lambda t: t.update({name.replace("up_proj", "up_projj"): np.zeros((40, 64), np.float32)}))
    refused(directory, r"is missing \(there is model\.layers\.1\.mlp\.up_projj\.weight\)")
    refused(directory, r"up_projj\.weight in model\.safetensors of shape \(40, 64\) is not part of the model")


QWEN_MTP = {f"mtp.{name}.weight": np.ones((4, 4), np.float32) for name in ("fc", "norm", "layers.0.mlp.gate")}


def test_layers_of_multi_token_prediction_are_not_read_which_is_said(tmp_path, caplog) -> None:
    directory = copy_of("glm4_moe", tmp_path)
    more = {f"model.layers.3.{name}": np.ones((4, 4), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    change_tensors(directory, lambda tensors: tensors.update(more))
    load_hf(str(directory), mesh_of("1,1,1", 1))
    assert "layers of multi-token prediction, model.layers.3." in caplog.text
    change_tensors(directory, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    refused(directory, r"model\.layers\.3\.enorm\.weight in .* is not part of the model")
    change_tensors(directory, lambda tensors: (tensors.pop("model.layers.3.enorm.weight"), tensors.update(QWEN_MTP)))
    load_hf(str(directory), mesh_of("1,1,1", 1))
    assert "layers of multi-token prediction, mtp." in caplog.text
    change_tensors(directory, lambda tensors: tensors.update({"model.visual.norm.weight": np.ones(4, np.float32)}))
    load_hf(str(directory), mesh_of("1,1,1", 1))
    assert f"not read of {directory}: the vision tower, model.visual.; prompts are text" in caplog.text


def test_a_config_of_another_model_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFiles, "read", lambda *_: pytest.fail("read"))
    config = Qwen3Config(
        max_seq_len=128, hidden_dim=64, intermediate_dim=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    refused(
        GOLDEN / "qwen2",
        r"self_attn\.q_norm\.weight of shape \(16,\) is missing; .*k_proj\.bias in .*not part of",
        config=config,
    )


def test_a_mesh_that_does_not_divide_an_axis_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"axis kv_head of size 2, which mesh axes tp would split into 4; .*mesh_shape"
    ):
        load_hf(str(GOLDEN / "llama3"), mesh_of("1,1,4"))


def test_the_leader_says_how_much_it_has_read_how_fast_and_who_is_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for hosts in map(Hosts, reversed(MemoryClient.hub(2))):
        told: list[tuple[int, int]] = []
        progress = LoadProgress(hosts, 4 << 20, lambda *counts, told=told: told.append(counts))
        progress._start -= 2.0
        progress.show([progress.note(1 << 20), 0.0])
        progress._last -= 10.0
        progress.show([progress.note(3 << 20), 0.5])
        assert hosts.last_phase == "loading the checkpoint, 3.00 MiB of 4.00 MiB read"
        progress.show([progress.note(4 << 20), 1.0])
        progress.show([progress.note(4 << 20), 1.0])
        assert told == [(1 << 20, 4 << 20), (2 << 20, 4 << 20), (1 << 20, 4 << 20)]
    early, end = (record.getMessage() for record in caplog.records)
    assert (
        early.startswith("loading: 3.00 MiB of 4.00 MiB on this host, 1.")
        and "MiB/s; process 1 is last with 50%" in early
    )
    assert end.startswith("loading: 4.00 MiB of 4.00 MiB on this host, ") and end.endswith(" MiB/s")
