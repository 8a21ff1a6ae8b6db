"""Where the parameters of a train step are placed."""

import jax
import pytest

from lockstep.errors import ConfigError
from lockstep.training.step import parameter_shardings
from tests.unit.training.bigrams import Bigrams


def test_a_parameter_that_the_mesh_does_not_divide_is_named():
    class Mesh:
        shape = {"dp": 1, "fsdp": 3, "tp": 1}

    with pytest.raises(ConfigError, match=r"parameter .*embed.*'embed' has size 16.*'fsdp' of size 3"):
        parameter_shardings(jax.eval_shape(lambda: Bigrams.init(jax.random.key(0))), Mesh())
