"""100,000 prompts through ``lockstep sample``: what a process holds hardly depends on how many there are."""

import json
import threading
import time
from pathlib import Path

import pytest

from lockstep.report import read_jsonl
from tests.multiprocess.harness import run_processes
from tests.multiprocess.test_place import PEAK
from tests.multiprocess.test_sample_load import anonymous

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

WARM_UP, FEW, MANY = 2_000, 50_000, 100_000
"""The first compiles what all need; the others are more than one of the pieces in which prompts travel."""
BYTES_PER_PROMPT = 300
"""That a prompt may add: its number in lists, sets and indices. As a request or a row it would take over 1,000."""
WHILE_GENERATING = 8 << 20
"""Bytes that may be added between the first tenth of the answers and the last of them."""


def body_stream(hosts, checkpoint, directory, count):
    from lockstep.batch_inference import JobConfig, SampleConfig
    from lockstep.batch_inference.run import sample
    from lockstep.report.trackers import NoopTrackerConfig

    run, done, seen = Path(directory) / str(count), threading.Event(), []
    prompts = Path(directory) / f"{count}.jsonl"
    with prompts.open("w") as file:
        for number in range(count):
            text = f"What is {number:06d} plus {number * 7 % 1000:03d} in words, and why is that so?"
            file.write(json.dumps({"prompt": text}) + "\n")

    def watch():
        rows = run / "samples" / "samples-host-000.jsonl"
        while not done.is_set():
            seen.append((rows.stat().st_size if rows.exists() else 0, anonymous()))
            time.sleep(0.02)

    config = SampleConfig(
        hf_checkpoint=checkpoint,
        prompts=str(prompts),
        trainer=JobConfig(log_dir=directory, run_id=str(count), tracker=NoopTrackerConfig()),
        max_new_tokens=1,
        temperature=1.0,
        ignore_eos=True,
        skip_samples_table=True,
    )
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert sample(config, hosts) == 0
    finally:
        done.set()
        thread.join()
    end = max(size for size, _ in seen)
    first = max(held for size, held in seen if size <= end / 10)
    return {"peak": max(held for _, held in seen), "first tenth": first}


def test_memory_does_not_grow_with_the_number_of_prompts(checkpoint, tmp_path):
    found = {}
    for count in (WARM_UP, FEW, MANY):
        arguments = (str(checkpoint), str(tmp_path), count)
        (found[count],) = run_processes(body_stream, processes=1, devices=1, timeout_s=900, args=arguments, own=PEAK)
    print({count: {what: round(held / 2**20, 1) for what, held in each.items()} for count, each in found.items()})
    rows = read_jsonl(tmp_path / str(MANY) / "samples" / "samples.jsonl")
    assert [row["prompt_id"] for row in rows] == list(range(MANY))
    assert found[MANY]["peak"] - found[FEW]["peak"] < (MANY - FEW) * BYTES_PER_PROMPT
    assert found[MANY]["peak"] - found[MANY]["first tenth"] < WHILE_GENERATING
