"""A loop whose callback is made before the job is joined, or whose job is never joined: see test_joining.py."""

import json
import os
import sys
from pathlib import Path

import jax

import lockstep
from lockstep.placement import make_mesh
from tests import tiny

CONFIG = lockstep.InferenceEvalConfig(
    prompts=["one"], eval_every=1, max_new_tokens=4, temperature=0.0, timeout_s=60, on_error="raise"
)


def join(how: str) -> None:
    """Join the job in one of the ways that there are."""
    if how == "start":
        lockstep.start()
    elif how == "initialize":
        jax.distributed.initialize(
            os.environ["LOCKSTEP_COORDINATOR_ADDRESS"],
            int(os.environ["LOCKSTEP_NUM_PROCESSES"]),
            int(os.environ["LOCKSTEP_PROCESS_ID"]),
        )


def main(how: str, directory: str) -> None:
    """Two rounds of a callback that was made before the job."""
    callback = lockstep.SampleCallback(CONFIG, tiny.tokenizer(), output_dir=Path(directory))
    join(how)
    mesh = make_mesh("auto")
    model = (tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))
    callback.check(model)
    for step in (1, 2):
        callback(tiny.Info(step, model))
    callback.finish()
    counts = {"process": jax.process_index(), "of": lockstep.hosts.current().count, "rounds": callback.rounds}
    print("COUNTS " + json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
