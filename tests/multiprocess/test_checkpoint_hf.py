"""Hugging Face checkpoints between real processes: each reads its share, all gather, the leader writes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.numpy import load_file

from lockstep.hosts import Hosts
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
    from lockstep.models.hf import files
    from lockstep.placement import COMPUTE_AXES, make_mesh, place

    counted: list[int] = []
    read = files.CheckpointFiles.read

    def counting(self: Any, name: str, slices: tuple[slice, ...]) -> Any:
        block = read(self, name, slices)
        counted.append(block.nbytes)  # from several threads
        return block

    mesh = make_mesh("auto")
    with jax.no_execution(True), mock.patch.object(files.CheckpointFiles, "read", counting):
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
    return {"bytes": sum(counted), "difference": difference, "error": str(caught.value)}


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_reads_its_share_and_the_leader_writes_the_whole(processes: int, tmp_path: Path) -> None:
    target = tmp_path / "out"
    results = run_processes(
        body_load_and_save, processes=processes, devices=4 // processes, args=("qwen2", str(target)), timeout_s=300
    )
    stored = load_file(GOLDEN / "qwen2" / "model.safetensors")
    # Biases have no embed axis, so FSDP alone leaves them whole on every device.
    biases = sum(t.nbytes for name, t in stored.items() if name.endswith("bias"))
    share = (sum(t.nbytes for t in stored.values()) - biases) // processes + biases
    assert [r["bytes"] for r in results] == [share] * processes
    assert max(r["difference"] for r in results) < 1e-4
    assert {r["error"] for r in results} == {results[0]["error"]}
    assert "no space left on device" in results[0]["error"]
    saved = {n: t for file in target.glob("*.safetensors") for n, t in load_file(file).items()}
    assert saved.keys() == stored.keys()
    assert all((saved[n] == stored[n].astype("float32")).all() for n in stored)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
