"""A table is put on all hosts by device_put, which sends it around to compare it: 64 MiB with 64 hosts, each time."""

import jax
import numpy as np
from pod import replicated, start

mesh = start()
table = np.zeros((512, 512), np.float32)
jax.device_put(table, replicated(mesh))  # BUG: comparison
