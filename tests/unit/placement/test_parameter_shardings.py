"""Where the arrays of a model are placed."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement import make_mesh, parameter_shardings
from tests.unit.training.bigrams import Bigrams


def shapes():
    return jax.eval_shape(lambda: Bigrams.init(jax.random.key(0)))


def test_a_parameter_that_the_mesh_does_not_divide_is_named():
    class Mesh:
        shape = {"dp": 1, "fsdp": 3, "tp": 1}

    with pytest.raises(ConfigError, match=r"parameter .*embed.*'embed' has size 16.*'fsdp' of size 3"):
        parameter_shardings(shapes(), Mesh())


def test_an_array_without_axes_is_on_every_device():
    assert parameter_shardings(jax.ShapeDtypeStruct((3, 5), np.float32), make_mesh("1,2,2")).spec == PartitionSpec()
