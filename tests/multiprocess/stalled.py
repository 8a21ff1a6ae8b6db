"""Runs ``lockstep`` in a process that stops for a minute where its weights come from.

python -m tests.multiprocess.stalled loading ARGUMENT ...    process 0 while it reads a checkpoint
python -m tests.multiprocess.stalled making ARGUMENT ...     every process while it makes a model
"""

import sys
import time
from typing import Any

from lockstep.hosts import current
from lockstep.main import cli
from lockstep.models.hf import load
from lockstep.training import Trainer

STALLED = "stalled here"
"""What a process prints when it stops."""


def stalling(function: Any, everywhere: bool) -> Any:
    def stalled(*arguments: Any, **values: Any) -> Any:
        if everywhere or current().is_leader:
            print(STALLED, flush=True)
            time.sleep(60)
        return function(*arguments, **values)

    return stalled


if __name__ == "__main__":
    where, *sys.argv[1:] = sys.argv[1:]
    if where == "loading":
        load.skeleton = stalling(load.skeleton, everywhere=False)
    else:
        Trainer.init_model = stalling(Trainer.init_model, everywhere=True)
    cli.main()
