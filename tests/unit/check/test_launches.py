import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src import pjit

from lockstep.check import record_launches
from lockstep.errors import ConfigError


@jax.jit
def double(x):
    return 2 * x


def test_each_call_is_seen_also_of_what_was_called_before():
    x = jnp.ones(3)
    compiled = double.lower(x).compile()
    double(x), compiled(x)
    with record_launches() as launches:
        for _ in range(3):
            double(x)
        compiled(x)
        compiled(x)
    assert launches == ["jit(double)"] * 5
    double(x)
    assert len(launches) == 5  # no longer


def test_eager_operations_are_seen_and_what_is_refused_is_not():
    x = jnp.ones(3)
    with record_launches() as launches:
        x + x
        with jax.no_execution(True), pytest.raises(RuntimeError, match="no_execution"):
            x * x
    assert len(launches) == 1 and "add" in launches[0]


def test_a_version_of_jax_without_what_is_replaced_is_refused(monkeypatch):
    monkeypatch.delattr(pjit, "_get_fastpath_data")
    with (
        pytest.raises(ConfigError, match=r"does not know jax .* no jax._src.pjit._get_fastpath_data"),
        record_launches(),
    ):
        pass


def test_the_check_itself_does_not_import_jax():
    """A checked script may set what JAX reads when it is imported."""
    code = "import sys, lockstep.check; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
