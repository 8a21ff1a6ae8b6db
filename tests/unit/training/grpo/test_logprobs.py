"""The program of log-probabilities: as the objective computes them, whatever the microbatches."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.hosts import Ledger
from lockstep.placement import make_mesh
from lockstep.training.grpo.logprobs import LogprobProgram
from lockstep.training.objectives import GrpoConfig
from lockstep.training.precision import parse_precision
from tests import tiny


@pytest.mark.parametrize("microbatches", [1, 4])
def test_each_row_has_its_own_log_probabilities(microbatches):
    mesh = make_mesh("auto")
    model = tiny.init_model(tiny.make_trainer("auto", 1))
    tokens = np.asarray(tiny.rows(8 * mesh.size).columns["tokens"])
    ledger = Ledger()
    objective = GrpoConfig(temperature=0.6, vocab_size=40)
    program = LogprobProgram(
        "some_logprobs",
        objective,
        mesh=mesh,
        precision=parse_precision("f32"),
        microbatches=microbatches,
        ledger=ledger,
    )
    digests = program.compile(model, *tokens.shape)
    assert program.compile(model, *tokens.shape) == digests and program.traces == 1
    found = program(model, program.place(tokens))
    with jax.set_mesh(mesh):
        whole = jax.jit(objective.answer_logprobs, out_shardings=NamedSharding(mesh, P()))(model, tokens)
    np.testing.assert_allclose(found[:, 1:], whole, atol=1e-5)
    assert not found[:, 0].any() and ledger.count == 1
