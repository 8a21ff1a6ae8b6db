"""Tests of multi-host JAX programs on CPU: functions in real processes that are started once, and checks inside them.

It imports neither JAX nor the rest of lockstep until a process or a check needs them. docs/testing.md
"""

from lockstep.testing.checks import assert_no_retrace as assert_no_retrace
from lockstep.testing.checks import assert_nothing_left as assert_nothing_left
from lockstep.testing.checks import assert_same_launches as assert_same_launches
from lockstep.testing.group import run_threads as run_threads
from lockstep.testing.pool import PoolSettings as PoolSettings
from lockstep.testing.pool import configure as configure
from lockstep.testing.pool import run_processes as run_processes
