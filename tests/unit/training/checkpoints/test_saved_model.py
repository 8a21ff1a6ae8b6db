"""The model in a training checkpoint, without the run that saved it."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraConfig
from lockstep.models.hf.saved_tensor import saved_tensors
from lockstep.placement import make_mesh
from lockstep.text import load_tokenizer, tokenizer_digest
from lockstep.training import has_checkpoint, saved_at, saved_model
from lockstep.training.checkpoints import writers
from lockstep.training.checkpoints.arrays import ArrayReader
from lockstep.training.checkpoints.checkpoint import METADATA, DamagedCheckpointError, _sealed
from lockstep.training.checkpoints.config import write_resumable
from lockstep.training.checkpoints.saved_model import SavedAdapters
from lockstep.training.step.train_state import AverageState
from tests import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with checkpoints of steps 4 and 8, and the model of the last one."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "SPLIT_BYTES", 0)
        tiny.save_checkpoint(str(directory / "checkpoints"), step=4)
        model = tiny.save_checkpoint(str(directory / "checkpoints"), step=8, mesh_shape="1,2,-1", seed=1)
    write_resumable(directory, "checkpoints")
    return directory, jax.tree.map(np.asarray, model)


def same(read, model):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True))


def test_a_run_its_checkpoints_or_one_of_them_is_found(run):
    directory, _ = run
    for path, step in [(directory, 8), (directory / "checkpoints", 8), (directory / "checkpoints" / "step-4", 4)]:
        assert has_checkpoint(str(path)) and saved_at(str(path)) > 0
        found = saved_model(str(path))
        assert found.metadata.step == step and found.path == str(directory / "checkpoints" / f"step-{step}")
    assert saved_model(str(directory), 4).metadata.step == 4
    assert (found.config, found.vocab_size, found.dtype) == (tiny.CONFIG, tiny.vocab_size(), "float32")
    assert found.rows % 128 == 0 and found.rows > found.vocab_size


def test_the_tokenizer_is_beside_the_checkpoints(run):
    found = saved_model(str(run[0]))
    assert found.tokenizer == str(run[0] / "checkpoints" / "tokenizer")
    assert tokenizer_digest(load_tokenizer(found.tokenizer)) == tokenizer_digest(tiny.tokenizer())


def test_the_tokenizer_that_a_checkpoint_names_elsewhere_is_not_opened(run, tmp_path):
    shutil.copytree(run[0] / "checkpoints" / "step-8", tmp_path / "step-8")
    with pytest.raises(ConfigError, match=f"no tokenizer at .*Set tokenizer; the run had '{tiny.TOKENIZER}'"):
        _ = saved_model(str(tmp_path / "step-8")).tokenizer


@pytest.mark.parametrize("name", ["/etc", "../step-4", "..", "", "memory::a", None, 3])
def test_the_arrays_of_a_checkpoint_are_inside_it(run, tmp_path, name):
    shutil.copytree(run[0] / "checkpoints" / "step-8", tmp_path / "step-8")
    file = tmp_path / "step-8" / METADATA
    values = json.loads(file.read_text()) | {"arrays": name}
    file.write_text(_sealed({key: value for key, value in values.items() if key != "digest"}))
    with pytest.raises(ConfigError, match=r"metadata\.json names .* which is not the name of a file beside it"):
        saved_model(str(tmp_path / "step-8"))


@pytest.mark.parametrize("mesh_shape", ["1,-1,1", "1,2,-1"])
def test_it_is_read_into_any_mesh_and_nothing_is_launched(run, mesh_shape):
    directory, model = run
    mesh = make_mesh(mesh_shape)
    with jax.no_execution(True):
        read = saved_model(str(directory)).read(mesh, "float32")
    assert same(read, model) and read.embed.array.sharding.mesh == mesh
    assert read.embed.array.sharding.shard_shape(read.embed.array.shape)[1] < tiny.CONFIG.hidden_dim


def test_it_is_read_in_another_type_as_it_would_be_cast(run):
    directory, model = run
    with jax.no_execution(True):
        read = saved_model(str(directory)).read(make_mesh("auto"), "bfloat16")
    assert same(read, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))


def test_parts_are_read_without_devices(run):
    directory, model = run
    found = saved_model(str(directory))
    read = found.reader()
    skeleton = found.skeleton()
    for tensor, whole in zip(
        saved_tensors(skeleton, None, found.vocab_size), saved_tensors(model, None, found.vocab_size), strict=True
    ):
        array = whole.parameter.value.array
        stored = whole.to_stored(array if whole.layer is None else array[whole.layer])
        pieces = [read(tensor, *piece) for piece in tensor.pieces(tensor.nbytes // 3)]
        np.testing.assert_array_equal(np.concatenate(pieces), stored[: tensor.shape[0]])


def test_the_factors_of_adapters_are_read_layer_by_layer_without_their_base(tmp_path):
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), base_dtype="bfloat16")
    adapters = SavedAdapters(lora=lora, base="elsewhere", fingerprint="0")
    pairs = tiny.save_checkpoint(str(tmp_path), adapters=adapters)
    read = saved_model(str(tmp_path)).pair_reader()
    for name, layer in itertools.product(pairs, range(tiny.CONFIG.num_layers)):
        for found, whole in zip(read(name, layer), (pairs[name].a, pairs[name].b), strict=True):
            np.testing.assert_array_equal(found, whole.array[layer])
            assert found.dtype == np.float32 and whole.dtype == jnp.bfloat16


def averaged(trained):
    """What an optimizer keeps for trained parameters, whose average is twice them."""
    return (), AverageState(average=jax.tree.map(lambda leaf: 2 * leaf.astype(np.float32), trained))


def test_the_average_is_read_where_the_optimizer_kept_one_as_the_run_samples_and_saves_it(tmp_path):
    model = tiny.save_checkpoint(str(tmp_path), opt_state=averaged)
    found = saved_model(str(tmp_path))
    assert same(found.read(make_mesh("1,2,-1"), "float32"), jax.tree.map(lambda leaf: 2 * leaf, model))
    (embedding,) = (one for one in saved_tensors(found.skeleton(), None, found.vocab_size) if "embed" in one.name)
    expected = 2 * np.asarray(model.embed.array)[: found.vocab_size]
    np.testing.assert_array_equal(found.reader()(embedding, 0, found.vocab_size), expected)


def test_the_average_of_adapters_is_read_in_their_place(tmp_path):
    lora = LoraConfig(r=2, target_modules=("q_proj",), base_dtype="bfloat16")
    adapters = SavedAdapters(lora=lora, base="elsewhere", fingerprint="0")
    pairs = tiny.save_checkpoint(str(tmp_path), adapters=adapters, opt_state=averaged)
    name = next(iter(pairs))
    a, _ = saved_model(str(tmp_path)).pair_reader()(name, 1)
    np.testing.assert_array_equal(a, 2 * np.asarray(pairs[name].a.array[1], np.float32))


def test_arrays_are_stored_layer_by_layer_where_they_are_large(run):
    """So that an export, which reads one layer at a time, does not read all of them each time."""
    found = saved_model(str(run[0]))
    reader = ArrayReader(found.directory.of(8) / found.metadata.arrays)
    reader.read("model.layers.stacked.mlp.gate.0", (0,))
    chunk = reader._open["model.layers.stacked.mlp.gate.0"].chunk_layout.read_chunk.shape
    assert chunk[0] == 1 and chunk[1] > 1


def test_what_is_not_there_is_said_plainly(run, tmp_path):
    directory, _ = run
    assert not has_checkpoint(str(tmp_path)) and not has_checkpoint(str(directory / "checkpoints" / "step-5"))
    assert not has_checkpoint("no\0path")
    with pytest.raises(ConfigError, match=r"there is no training checkpoint in .* Give a run directory"):
        saved_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 5 .* found those of steps 4, 8"):
        saved_model(str(directory), 5)


def test_a_checkpoint_that_does_not_say_what_its_model_is_is_refused(run, tmp_path):
    shutil.copytree(run[0] / "checkpoints" / "step-8", tmp_path / "step-8")
    file = tmp_path / "step-8" / METADATA
    values = json.loads(file.read_text())
    del values["digest"]
    file.write_text(_sealed(values | {"model": None}))
    with pytest.raises(ConfigError, match="does not say what its model is"):
        saved_model(str(tmp_path / "step-8"))
    file.write_text(_sealed(values | {"shapes": values["shapes"] | {"model.extra.0": "float32[2]"}}))
    with pytest.raises(ConfigError, match=r"are not those of its model: model\.extra\.0"):
        saved_model(str(tmp_path / "step-8"))


def test_a_flipped_bit_is_found_by_whoever_reads_the_model(run, tmp_path):
    shutil.copytree(run[0] / "checkpoints" / "step-8", tmp_path / "step-8")
    found = saved_model(str(tmp_path / "step-8"))
    (file,) = (tmp_path / "step-8").glob("arrays-*/ocdbt.process_0/d/*")
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 100):  # somewhere in every array
        data[place] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=f"{file} is damaged: "):  # lockstep sample
        found.read(make_mesh("1,-1,1"), "float32")
    read = found.reader()  # lockstep export
    embedding = saved_tensors(found.skeleton(), None, found.vocab_size)[0]
    with pytest.raises(DamagedCheckpointError, match=f"{file} is damaged: "):
        read(embedding, 0, 1)


def test_two_saves_are_told_apart(run):
    assert saved_model(str(run[0]), 4).fingerprint() != saved_model(str(run[0]), 8).fingerprint()
