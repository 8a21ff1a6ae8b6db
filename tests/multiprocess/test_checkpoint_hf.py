"""Hugging Face checkpoints between real processes: each reads its share, all gather, the leader writes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lockstep.hosts import Hosts
from tests import tiny
from tests.golden.variants import HEAD, VARIANTS
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launcher import REPOSITORY

pytestmark = pytest.mark.multiprocess

GOLDEN = REPOSITORY / "tests" / "golden"


def body_load_and_save(hosts: Hosts, family: str, target: str) -> dict[str, Any]:
    import haliax as hax
    import jax
    import numpy as np

    from lockstep.errors import PeerError
    from lockstep.models import load_hf, save_hf
    from lockstep.placement import COMPUTE_AXES, make_mesh, place

    mesh = make_mesh("auto")
    model = load_hf(str(GOLDEN / family), mesh)
    golden = np.load(GOLDEN / family / "golden.npz")
    # Twice the two rows: one for each of four devices.
    rows = np.tile(golden["input_ids"], (2, 1))
    ids = hax.named(place(rows, jax.NamedSharding(mesh, jax.P(("dp", "fsdp")))), ("batch", "position"))
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda m, i: m(i), axis_resources=COMPUTE_AXES)(model, ids)
    expected = np.tile(golden["logits"], (2, 1, 1))
    difference = max(float(np.abs(s.data - expected[s.index]).max()) for s in logits.array.addressable_shards)
    save_hf(model, target, max_shard_bytes=60_000, hosts=hosts)

    class Broken:
        def save_pretrained(self, directory: str) -> None:
            raise OSError("no space left on device")

    with pytest.raises(PeerError) as caught:
        save_hf(model, target, tokenizer=Broken(), hosts=hosts)
    return {"difference": difference, "error": str(caught.value)}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_processes_load_their_shares_and_the_leader_writes_the_whole(processes: int, tmp_path: Path) -> None:
    target = tmp_path / "out"
    results = run_processes(
        body_load_and_save, processes=processes, devices=4 // processes, args=("qwen2", str(target)), timeout_s=300
    )
    stored = load_file(GOLDEN / "qwen2" / "model.safetensors")
    assert max(r["difference"] for r in results) < 1e-4
    assert {r["error"] for r in results} == {results[0]["error"]}
    assert "no space left on device" in results[0]["error"]
    saved = {n: t for file in target.glob("*.safetensors") for n, t in load_file(file).items()}
    assert saved.keys() == stored.keys()
    assert all((saved[n] == stored[n].astype("float32")).all() for n in stored)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def body_own_head(hosts: Hosts, checkpoint: str, target: str) -> bool:
    from lockstep.models import load_config, load_hf, save_hf
    from lockstep.placement import make_mesh

    model = load_hf(checkpoint, make_mesh("auto"), hosts=hosts)
    save_hf(model, target, hosts=hosts)
    return model.lm_head is not None and model.config == load_config(checkpoint)


@pytest.mark.slow
def test_an_own_head_that_one_process_sees_is_every_process_s_and_saved(tmp_path: Path) -> None:
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "out"
    VARIANTS["tied_with_head_of_other_last_rows"].write(checkpoint)  # the second process compares those
    assert all(run_processes(body_own_head, processes=2, devices=2, args=(str(checkpoint), str(target))))
    stored, saved = (load_file(place / "model.safetensors")[HEAD] for place in (checkpoint, target))
    assert (saved == stored.astype("float32")).all()


CONFIG = dataclasses.replace(tiny.CONFIG, hidden_dim=256, intermediate_dim=640, num_layers=4, num_heads=8)
VOCAB = 1010
"""Four devices read unequal numbers of its rows."""


def body_read(hosts: Hosts, url: str, mesh_shape: str, expected: str, readers: int = 32) -> dict[str, Any]:
    import jax
    import numpy as np

    from lockstep.models import load_hf
    from lockstep.models.hf import row_layout
    from lockstep.placement import make_mesh
    from tests.counted_files import CountedFiles

    row_layout.MAX_READERS = readers
    CountedFiles.bytes_read()
    model = load_hf(url, make_mesh(mesh_shape), hosts=hosts)
    requests, read = len(CountedFiles.reads), CountedFiles.bytes_read()
    leaves = jax.tree.leaves(model)
    shards = [{str(shard.index): shard for shard in leaf.addressable_shards} for leaf in leaves]
    with np.load(expected) as values:
        for number, different in enumerate(shards):
            for shard in different.values():
                np.testing.assert_array_equal(shard.data, values[str(number)][shard.index])
    union = sum(shard.data.nbytes for different in shards for shard in different.values())
    return {"read": read, "requests": requests, "union": union, "whole": sum(leaf.nbytes for leaf in leaves)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import jax
    import numpy as np

    from lockstep.models import as_trainable, save_hf

    path = tmp_path_factory.mktemp("reads") / "checkpoint"
    mesh = jax.sharding.Mesh([jax.devices()[0]], ("fsdp",))
    weights = jax.device_put(tiny.numpy_weights(CONFIG, VOCAB), jax.NamedSharding(mesh, jax.P()))
    model = as_trainable(CONFIG, weights)
    save_hf(model, path, max_shard_bytes=4 << 20)
    np.savez(path.with_name("expected.npz"), **{str(k): leaf for k, leaf in enumerate(jax.tree.leaves(model))})
    return path


@pytest.mark.parametrize(
    ("processes", "mesh_shape"),
    [
        (2, "auto"),
        (2, "host_local"),
        *(pytest.param(4, shape, marks=pytest.mark.nightly) for shape in ("auto", "2,-1,1", "1,-1,2")),
    ],
)
def test_processes_read_every_byte_once_between_them(processes: int, mesh_shape: str, checkpoint: Path) -> None:
    expected = str(checkpoint.with_name("expected.npz"))
    results = run_processes(
        body_read, processes=processes, args=(f"counted://{checkpoint}", mesh_shape, expected), timeout_s=300
    )
    for result in results:
        print(result)
        assert result["read"] <= 1.1 * result["union"]
        # A request for each tensor of its rows, two for each header; no row, and no column, is a request of its own.
        tensors = 4 * 9 + 3
        assert result["requests"] <= 2 * tensors + 2 * 8
    whole = results[0]["whole"]
    assert whole <= sum(result["read"] for result in results) <= 1.02 * whole


@pytest.mark.parametrize(
    ("processes", "mesh_shape", "readers"),
    [
        (2, "auto", 1),
        pytest.param(4, "1,-1,2", 2, marks=pytest.mark.nightly),
        pytest.param(4, "host_local", 2, marks=pytest.mark.nightly),
    ],
)
def test_few_processes_read_and_all_get_the_same(
    processes: int, mesh_shape: str, readers: int, checkpoint: Path
) -> None:
    """The arrays are compared with the expected ones in each process."""
    expected = str(checkpoint.with_name("expected.npz"))
    results = run_processes(
        body_read, processes=processes, args=(f"counted://{checkpoint}", mesh_shape, expected, readers), timeout_s=300
    )
    for number, result in enumerate(results):
        print(result)
        reads = number % (processes // readers) == 0
        assert reads == (result["requests"] > 0) == (result["read"] > 0)
    whole = results[0]["whole"]
    assert whole <= sum(result["read"] for result in results) <= 1.02 * whole
