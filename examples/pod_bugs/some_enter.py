"""Process 0 alone gathers what all have. In one process it works; in several the others never come."""

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from pod import start

start()
losses = np.ones(3)
if jax.process_index() == 0:
    print(process_allgather(losses))  # BUG: some_enter
