"""Extras that an environment of tests may lack."""

import sys
from importlib.util import find_spec

import pytest

NEEDS_CLIENTS = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("levanter", "tunix")),
    reason="the extras levanter and tunix, which pin jax 0.11, are not installed",
)
"""The mark of a test that reads every public name, those for Levanter and Tunix too."""
NEEDS_VERIFIERS = pytest.mark.skipif(find_spec("verifiers") is None, reason="the extra verifiers is not installed")
"""The mark of a test of environments of verifiers."""
NEEDS_OPENENV = pytest.mark.skipif(find_spec("openenv") is None, reason="openenv-core is not installed")
"""The mark of a test of environments of OpenEnv."""

NEEDS_DRACCUS_PARSE = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="on Python 3.14 draccus 0.11.6 says that `int | None` is not callable"
)
"""For tests of a user's script that reads its command line by draccus; ours is read without it."""
