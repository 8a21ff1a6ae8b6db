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

from lockstep.errors import ConfigError
from lockstep.models import Qwen3Config, load_config, load_hf
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.load import read_block
from lockstep.models.hf.names import LLAMA_TENSORS, parameters, skeleton
from lockstep.placement import COMPUTE_AXES, PARAMETER_AXES, make_mesh

GOLDEN = Path(__file__).parents[3] / "golden"
FAMILIES = ["llama3", "llama_tied", "mistral", "qwen2", "qwen3"]


def mesh_of(shape: str, devices: int = 4) -> Mesh:
    return make_mesh(shape, jax.devices()[:devices])


def copy_of(family: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / family, target / family))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("shape", ["1,1,1", "1,2,2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, shape: str, record_property: Any) -> None:
    golden = np.load(GOLDEN / family / "golden.npz")
    mesh = mesh_of(shape, 1 if shape == "1,1,1" else 4)
    with jax.no_execution(True):
        model = load_hf(str(GOLDEN / family), mesh)
    ids = hax.named(golden["input_ids"], ("batch", "position"))
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda m, i: m(i), axis_resources=COMPUTE_AXES)(model, ids)
    difference = float(np.abs(np.asarray(logits.array) - golden["logits"]).max())
    record_property("max_abs_difference", difference)
    assert difference < 1e-4


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


class CountingFiles(CheckpointFiles):
    """Counts the bytes of each tensor's slices; several threads read."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self.blocks: list[int] = []

    @property
    def bytes_read(self) -> int:
        return sum(self.blocks)

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        block = super().read(name, slices)
        self.blocks.append(block.nbytes)
        return block


@pytest.mark.parametrize(("shape", "share"), [("1,4,1", 0.5), ("1,2,2", 0.5), ("2,2,1", 1.0)])
def test_a_host_reads_only_what_its_devices_hold(shape: str, share: float) -> None:
    # Two processes of two devices: rows 0-1 and 2-3 of the mesh. With dp=2 each holds the whole model.
    mesh = mesh_of(shape)
    processes = [set(mesh.devices.flat[:2]), set(mesh.devices.flat[2:])]
    model = skeleton(112, load_config(str(GOLDEN / "qwen3")))
    total = sum(np.prod(p.value.array.shape) * 2 for p in parameters(model, LLAMA_TENSORS))
    counted = []
    for devices in processes:
        with CountingFiles(GOLDEN / "qwen3") as files:
            for parameter in parameters(model, LLAMA_TENSORS):
                spec = hax.partitioning.pspec_for_axis(parameter.value.axes, PARAMETER_AXES)
                indices = jax.NamedSharding(mesh, spec).devices_indices_map(parameter.value.array.shape)
                for index in {indices[device] for device in devices}:
                    read_block(files, parameter, index, np.dtype(np.float32))
            counted.append(files.bytes_read)
    # Head norms (24 wide) are on every device; nothing else is.
    repeated = 2 * 2 * 24 * 2
    assert counted == [share * (total - repeated) + repeated] * 2


def test_loading_reads_each_block_once_however_many_devices_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[CountingFiles] = []

    def counting(directory: Path) -> CountingFiles:
        counters.append(CountingFiles(directory))
        return counters[-1]

    monkeypatch.setattr("lockstep.models.hf.load.CheckpointFiles", counting)
    model = load_hf(str(GOLDEN / "qwen3"), mesh_of("4,1,1"))
    assert counters[0].bytes_read == sum(leaf.size * 2 for leaf in jax.tree.leaves(model))


def test_progress_counts_every_byte_of_this_host() -> None:
    told: list[tuple[int, int]] = []
    model = load_hf(str(GOLDEN / "qwen3"), mesh_of("1,4,1"), on_read=lambda *counts: told.append(counts))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(model) for shard in leaf.addressable_shards)
    assert sum(read for read, _ in told) == held
    assert {total for _, total in told} == {held}


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
