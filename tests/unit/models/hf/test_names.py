"""Which Hugging Face tensor each parameter has, and how their axes correspond."""

import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from lockstep.models.families.llama import TENSORS
from lockstep.models.families.registry import family_of
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.names import HFTensor, Parameter, parameters, stored_shapes
from lockstep.models.hf.row_layout import RowGather, RowLayout
from lockstep.models.hf.row_reader import ParameterRead
from lockstep.models.hf.saved_tensor import SavedTensor, file_header
from lockstep.models.trainable import skeleton
from lockstep.placement import make_mesh, place
from tests.unit.engine.models import FAMILIES, LLAMA

SIZES = {"embed": 6, "kv_head": 4, "q_heads_per_group": 2, "head_size": 3}
Q = HFTensor("layer.{layer}.q", (("kv_head", "q_heads_per_group", "head_size"), ("embed",)))
AXES = ("embed", "kv_head", "q_heads_per_group", "head_size")


def test_axes_are_flattened_into_the_stored_dimensions():
    assert Q.shape(SIZES) == (4 * 2 * 3, 6)


def test_what_is_stored_is_read_back():
    array = np.random.default_rng(0).standard_normal([SIZES[axis] for axis in AXES])
    stored = Q.to_stored(array, AXES, SIZES)
    np.testing.assert_array_equal(stored[2 * 3 : 2 * 3 + 3], array[:, 1, 0].T)
    np.testing.assert_array_equal(Q.from_stored(stored, AXES, SIZES), array)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
def test_every_parameter_of_a_family_has_its_tensors(family):
    config = FAMILIES[family]
    found = parameters(skeleton(10, config), family_of(config).tensors)
    names = [name for each in found for layer in each.layers for name in each.names(layer)]
    assert len(set(names)) == len(names) == len(stored_shapes(found))
    assert sum(each.layers == range(2) for each in found) >= 9


def test_shapes_are_those_that_hugging_face_stores():
    config = dataclasses.replace(LLAMA, num_layers=1)
    found = stored_shapes(parameters(skeleton(10, config), TENSORS))
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (10, 16)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (4 * 8, 16)
    assert found["model.layers.0.self_attn.k_proj.weight"] == (2 * 8, 16)
    assert found["model.layers.0.self_attn.o_proj.weight"] == (16, 4 * 8)
    assert found["model.layers.0.mlp.down_proj.weight"] == (16, 24)


@pytest.mark.parametrize("spec", [PartitionSpec(None, "tp", "fsdp"), PartitionSpec(None, None, None, ("fsdp", "tp"))])
def test_one_parameter_has_the_tensors_of_all_experts(spec, tmp_path):
    axes = (Axis("layer", 2), Axis("expert", 6), Axis("embed", 4), Axis("mlp", 8))
    values = np.random.default_rng(0).standard_normal([axis.size for axis in axes]).astype(np.float32)
    sharding = NamedSharding(make_mesh("1,2,2", jax.devices()[:4]), spec)
    stored = HFTensor("layer.{layer}.expert.{expert}", (("expert", "mlp"), ("embed",)))
    parameter = Parameter("up", "up", hax.named(place(values, sharding), axes), stored, range(2))
    assert parameter.names(1) == [f"layer.1.expert.{number}" for number in range(6)]
    assert stored_shapes([parameter]) == {name: (8, 4) for layer in range(2) for name in parameter.names(layer)}

    others = dataclasses.replace(parameter, layers=(1, 3))
    assert set(stored_shapes([others])) == {name for layer in (1, 3) for name in parameter.names(layer)}
    assert SavedTensor(parameter=others, layer=3, dtype=values.dtype, vocab_size=1).place == 1

    tensors = [SavedTensor(parameter=parameter, layer=n, dtype=values.dtype, vocab_size=1) for n in range(2)]
    gather = RowGather.of(tensors[1], 3 * 8 * 4 * 4)  # three experts at a time
    where = place(np.array([1, 3], np.int32), gather.replicated)
    np.testing.assert_array_equal(
        jax.jit(gather.gather)(parameter.value.array, where), tensors[1].to_stored(values[1])[24:]
    )
    data = b"".join(tensor.to_stored(values[tensor.layer]).tobytes() for tensor in tensors)
    (tmp_path / "model.safetensors").write_bytes(file_header(tensors) + data)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        _, layer, _, expert = name.split(".")
        np.testing.assert_array_equal(tensor, values[int(layer), int(expert)].T)

    layout = RowLayout.of(parameter, sharding)
    read = ParameterRead(CheckpointFiles(tmp_path), parameter, layout, values.dtype)
    for request in read.begin():
        request.run()
    np.testing.assert_array_equal(jax.jit(layout.move, out_shardings=layout.target)(read.place()), values)
