"""Loading a sharded checkpoint: a process never holds much more than its part."""

import dataclasses
import threading
import time
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from lockstep.models import as_trainable, save_hf
from tests import fake_gcs, tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launcher import REPOSITORY
from tests.multiprocess.test_place import PEAK

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHARD = 32 << 20
PIECES = 64 << 20
"""What is read at a time: a piece of 8 MiB by each of eight threads."""
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Makes the C library give freed buffers back at once; it keeps up to 16 MiB of them for each thread otherwise."""
CONFIG = dataclasses.replace(tiny.CONFIG, hidden_dim=512, intermediate_dim=2048, num_layers=8, num_heads=8)
VOCAB = 8192


def anonymous():
    """Bytes of this process that are not pages of a file, which the kernel may drop."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def body_load(hosts, checkpoint):
    from lockstep.batch_inference.checkpoint import HfCheckpoint, load
    from lockstep.models import read_hf_config
    from lockstep.placement import make_mesh

    read_hf_config(checkpoint)  # what reads the files is imported

    mesh = make_mesh("auto")
    small = HfCheckpoint(path=str(REPOSITORY / "tests" / "golden" / "llama3"))
    load(hosts, small, mesh, None)  # what compiles and connects is there
    before, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    model, read, seconds = load(hosts, HfCheckpoint(path=checkpoint), mesh, None)
    done.set()
    thread.join()
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(model) for s in leaf.addressable_shards)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    return {"grown": peak[0] - before, "held": held, "total": total, "read": read, "seconds": seconds}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "checkpoint"
    weights = tiny.numpy_weights(CONFIG, VOCAB)
    mesh = Mesh([jax.devices()[0]], ("fsdp",))
    model = as_trainable(CONFIG, jax.device_put(weights, jax.NamedSharding(mesh, jax.P())))
    save_hf(model, path, max_shard_bytes=SHARD)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


@pytest.mark.parametrize("place", [pytest.param("disk", marks=pytest.mark.nightly), "bucket"])
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_a_process_holds_its_part_and_64_mib_at_most(checkpoint, processes, place):
    with fake_gcs.serve() as bucket:
        source, environment = str(checkpoint), RETURN_FREED_MEMORY
        if place == "bucket":
            bucket.objects |= {f"bucket/model/{path.name}": path.read_bytes() for path in checkpoint.iterdir()}
            source, environment = "gs://bucket/model", bucket.environment | RETURN_FREED_MEMORY
        results = run_processes(
            body_load, processes=processes, args=(source,), env=environment, timeout_s=300, own=PEAK
        )
        sent = [size for path, size in bucket.reads if path.endswith(".safetensors")]
    if place == "bucket":
        print(f"{sum(sent)} bytes in {len(sent)} requests to {processes} processes")
        assert results[0]["total"] <= sum(sent) < 1.01 * results[0]["total"]
        # One request for each tensor, two for each header; no row, and no column, is a request of its own.
        files = len(list(checkpoint.glob("*.safetensors")))
        assert len(sent) <= processes * (9 * CONFIG.num_layers + 3 + 2 * files)
    for result in results:
        print({name: round(value / 2**20, 1) for name, value in result.items()})
        # Vectors are read once, by a process each its part; they are on every device. All else is split.
        assert result["held"] * 0.99 < result["read"] <= result["held"]
        assert result["held"] < result["total"] / processes * 1.02
        assert result["grown"] < result["held"] + PIECES
