"""`lockstep export` and saves of sharded models between real processes: shared out, bounded, and never half."""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests import tiny
from tests.multiprocess.harness import run_processes, run_unattended

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def body_export_and_sample(hosts, directory):
    """A checkpoint of both processes, exported by both, and what is sampled from each."""
    from lockstep.batch_inference import JobConfig, SampleConfig, sample
    from lockstep.models.hf import saved_tensor
    from lockstep.training import ExportConfig, export
    from tests.multiprocess.launches import record_launches

    before, saved_tensor.MIN_PART_BYTES = saved_tensor.MIN_PART_BYTES, 1
    try:
        tiny.save_checkpoint(f"{directory}/checkpoints", mesh_shape="1,2,2", hosts=hosts)
        hosts.barrier("saved")
        with record_launches() as launches:
            export(ExportConfig(checkpoint=f"{directory}/checkpoints", output=f"{directory}/out"), hosts)
        assert not launches, "an export needs no device"
    finally:
        saved_tensor.MIN_PART_BYTES = before
    for name, values in {
        "trained": {"checkpoint_path": f"{directory}/checkpoints"},
        "exported": {"hf_checkpoint": f"{directory}/out"},
    }.items():
        sample(
            SampleConfig(
                prompts=["What is 12 plus 7?", "and"],
                max_new_tokens=6,
                n_generations=2,
                trainer=JobConfig(log_dir=directory, run_id=name),
                **values,
            ),
            hosts,
        )


def test_a_training_checkpoint_is_sampled_from_and_exported_by_all_processes(tmp_path):
    run_processes(body_export_and_sample, processes=2, devices=2, args=(str(tmp_path),), timeout_s=240)
    rows = [(tmp_path / name / "samples" / "samples.jsonl").read_text() for name in ("trained", "exported")]
    assert len(rows[0].splitlines()) == 4 and rows[0] == rows[1]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) == 2 and set(index["weight_map"].values()) == {file.name for file in files}
    assert {name for file in files for name in load_file(file)} == set(index["weight_map"])


def body_memory(hosts, directory):
    """How much more memory a process takes for a save of a model of 192 MiB, of which it writes 96 MiB."""
    import dataclasses

    import jax

    from lockstep.models import as_trainable, save_hf
    from lockstep.models.hf import save, save_writer, saved_tensor
    from lockstep.placement import make_mesh

    for module in (save, save_writer):
        module.PIECE_BYTES = 1 << 20
    saved_tensor.MIN_PART_BYTES = 1
    config = dataclasses.replace(tiny.CONFIG, hidden_dim=512, num_heads=8)
    weights = tiny.placed_weights(make_mesh("auto"), config=config, vocab=48 << 10)
    model = as_trainable(config, weights)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    save_hf(model, f"{directory}/first", hosts=hosts)  # programs and libraries are there now
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    start = _kib("VmRSS")
    save_hf(model, f"{directory}/second", hosts=hosts)
    return whole, (_kib("VmHWM") - start) << 10


def _kib(name):
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith(name + ":")
    ]
    return int(line.split()[1])


@pytest.mark.nightly  # in make slow: test_sample_load.py, and test_place.py
def test_no_process_holds_more_than_some_pieces(tmp_path):
    results = run_processes(body_memory, processes=2, devices=2, args=(str(tmp_path),), own="it measures memory")
    print(results)
    for whole, more in results:
        assert whole > 190 << 20 and more < 32 << 20
    assert len(list((tmp_path / "second").glob("*.safetensors"))) == 2


def killed(directory: str) -> None:
    """An export that is killed when the first of its files is half written."""
    from lockstep.hosts import Hosts, MemoryClient
    from lockstep.models.hf import save_writer
    from lockstep.training import ExportConfig, export

    save_writer.PIECE_BYTES = 4096
    original = save_writer._as_bytes

    def die(rows):
        die.left -= 1
        if die.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(rows)

    die.left = 12
    save_writer._as_bytes = die
    config = ExportConfig(checkpoint=f"{directory}/checkpoints", output=f"{directory}/out")
    export(config, Hosts(MemoryClient.hub(1)[0]))


def test_an_export_that_is_killed_leaves_the_old_one_and_the_next_replaces_it(tmp_path):
    from lockstep.hosts import Hosts, MemoryClient
    from lockstep.training import ExportConfig, export

    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    config = ExportConfig(checkpoint=str(tmp_path / "checkpoints"), output=str(tmp_path / "out"))
    export(config, Hosts(MemoryClient.hub(1)[0]))
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    code = f"from tests.multiprocess.test_export import killed; killed({str(tmp_path)!r})"
    (end,) = run_unattended(["python", "-c", code], processes=1)
    assert end.code == -signal.SIGKILL, end.log
    (half,) = tmp_path.glob(".out.tmp-*")
    (written,) = half.glob("model.safetensors*")  # under a name of its own until it is whole
    assert 0 < written.stat().st_size < len(before["model.safetensors"])
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    export(config, Hosts(MemoryClient.hub(1)[0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]
