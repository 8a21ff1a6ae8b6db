"""Two processes that build a data cache; one of them killed in the middle; and validation over both."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lockstep.training.data import LmDataConfig
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

CHUNK_BYTES = 2000
DIES = "a chunk is half written when its process is killed"


def config_of(directory):
    return LmDataConfig(
        train_urls=(f"{directory}/train.jsonl",),
        validation_urls=(f"{directory}/held_out.jsonl",),
        cache_dir=f"{directory}/cache",
        format="prompt_completion",
        max_seq_len=24,
    )


def write(directory):
    """300 examples in 9 chunks to train on, 13 to validate with."""
    for name, count in (("train", 300), ("held_out", 13)):
        lines = (json.dumps({"prompt": f"What is {n} plus 7?", "completion": " nine"}) for n in range(count))
        Path(f"{directory}/{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def load(hosts, directory):
    from lockstep.training.data import records

    before, records.MIN_CHUNK_BYTES = records.MIN_CHUNK_BYTES, CHUNK_BYTES
    try:
        return config_of(directory).load(tiny.tokenizer(), 24, 0, hosts)
    finally:
        records.MIN_CHUNK_BYTES = before


def body_killed(hosts, directory):
    from lockstep.training.data import chunk_builder

    write_row, written = chunk_builder.RowWriter.write, []

    def write_or_die(self, row):
        written.append(row)
        if hosts.index == 1 and len(written) == 80:
            os.kill(os.getpid(), signal.SIGKILL)
        write_row(self, row)

    chunk_builder.RowWriter.write = write_or_die
    load(hosts, directory)


def body_again(hosts, directory):
    """What was there before; the digest of all rows, some of them; validation; the names of all launches."""
    from lockstep.training import lm_loss
    from lockstep.training.loop.validation import Validation

    hosts.barrier("before")
    there = sorted(path.name for path in Path(directory).glob("cache/*/chunk-*.json"))
    hosts.barrier("looked")
    rows = load(hosts, directory)
    trainer = tiny.make_trainer("auto", 4, hosts)
    held_out = config_of(directory).load_validation(tiny.tokenizer(), 24, hosts)
    validation = Validation(trainer, lm_loss, held_out, perplexity=True)
    figures = {}
    trainer.add_hook(validation, every=2)
    trainer.add_hook(lambda info: figures.update({info.next_step: dict(validation.metrics)}), every=2)
    with record_launches() as launches:
        trainer.train(tiny.init_model(trainer), rows)
    assert validation.traces == trainer.train_step_traces == 1
    return {
        "there": there,
        "digest": rows.digest(),
        "batch": rows.batch(3, 16, slice(0, 16))["tokens"].tolist(),
        "figures": list(figures.items()),
        "launches": list(launches),
    }


@pytest.mark.slow
def test_a_killed_build_goes_on_and_gives_the_rows_of_one_process(tmp_path):
    write(tmp_path)
    with pytest.raises(AssertionError):
        run_processes(body_killed, processes=2, devices=2, args=(str(tmp_path),), timeout_s=300, own=DIES)
    assert not list(tmp_path.glob("cache/*/metadata.json"))
    first, second = run_processes(body_again, processes=2, devices=2, args=(str(tmp_path),), timeout_s=300)
    assert first == second
    assert 0 < len(first["there"]) < 9, "the first build was killed in the middle"
    # 13 rows are two batches of 8, at two steps.
    assert sum("eval_step" in name for name in first["launches"]) == 4

    other = tmp_path / "other"
    other.mkdir()
    write(other)
    (oracle,) = run_processes(body_again, processes=1, devices=1, args=(str(other),), timeout_s=300)
    assert oracle["there"] == [] and (oracle["digest"], oracle["batch"]) == (first["digest"], first["batch"])
    for (step, found), (_, wanted) in zip(first["figures"], oracle["figures"], strict=True):
        assert step in (2, 4) and found.keys() == wanted.keys() and "eval/held_out/perplexity" in found
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
