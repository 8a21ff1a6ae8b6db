"""The program of log-probabilities: as the objective computes them, whatever the microbatches."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.hosts import Ledger
from lockstep.placement import batch_spec, make_mesh, place
from lockstep.training import TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.objectives import GrpoConfig
from tests import tiny


@pytest.mark.parametrize(
    ("microbatches", "replicated", "mesh_shape"),
    [
        (1, True, "auto"),
        (4, False, "auto"),
        pytest.param(2, False, "pp=2,fsdp=-1", marks=pytest.mark.slow),
        pytest.param(2, False, "fsdp=-1,cp=2", marks=pytest.mark.slow),
    ],
)
def test_each_row_has_its_own_log_probabilities(microbatches, replicated, mesh_shape):
    mesh = make_mesh(mesh_shape)
    model = tiny.init_model(tiny.make_trainer(mesh_shape, 1))
    tokens = np.asarray(tiny.rows(8 * mesh.size).columns["tokens"])
    ledger = Ledger()
    objective = GrpoConfig(temperature=0.6, vocab_size=40)
    trainer = TrainerConfig(train_batch_size=len(tokens), per_device_parallelism=8 // microbatches, mp="f32")
    program = LogprobProgram(
        "some_logprobs",
        lambda model, batch: objective.answer_logprobs(model, batch["tokens"]),
        trainer=trainer,
        mesh=mesh,
        ledger=ledger,
        replicated=replicated,
    )
    batch = {"tokens": place(tokens, NamedSharding(mesh, batch_spec(mesh)))}
    digests = program.compile(model, batch)
    assert program.compile(model, batch) == digests and program.traces == 1
    found = program(model, batch)
    assert found.sharding.is_fully_replicated == replicated
    with jax.set_mesh(mesh):
        whole = jax.jit(objective.answer_logprobs, out_shardings=NamedSharding(mesh, P()))(model, tokens)
    np.testing.assert_allclose(found, whole, atol=1e-5)
    assert ledger.count == 1
