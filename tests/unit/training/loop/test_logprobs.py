"""The program of log-probabilities: as the objective computes them, whatever the microbatches."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import batch_spec, make_mesh, place
from lockstep.training import TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.objectives import GrpoConfig
from lockstep.training.step.programs import Programs
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
    hosts = Hosts(MemoryClient.hub(1)[0])
    objective = GrpoConfig(temperature=0.6, vocab_size=40)
    trainer = TrainerConfig(train_batch_size=len(tokens), per_device_parallelism=8 // microbatches, mp="f32")
    program = LogprobProgram(
        "some_logprobs",
        lambda model, batch: objective.answer_logprobs(model, batch["tokens"]),
        trainer=trainer,
        programs=Programs(hosts, mesh),
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
    assert hosts.ledger.count == 1


def test_rows_that_share_answers_have_the_log_probabilities_of_each_and_empty_microbatches_none():
    """Half of the rows of each device hold three answers each, in two of four microbatches."""
    mesh = make_mesh("auto")
    model = tiny.init_model(tiny.make_trainer("auto", 1))
    answers = np.asarray(tiny.rows(12 * mesh.size, 8).columns["tokens"])
    objective = GrpoConfig()
    rows = np.zeros((8 * mesh.size, 24), np.int32)
    numbers = np.repeat(np.arange(1, 4, dtype=np.int32), 8)
    filled = np.arange(len(rows)) % 8 < 4  # on each device the first
    rows[filled] = answers.reshape(-1, 24)
    trainer = TrainerConfig(train_batch_size=len(rows), per_device_parallelism=2, mp="f32")
    program = LogprobProgram(
        "packed_logprobs",
        lambda model, batch: objective.answer_logprobs(model, batch["tokens"], batch["segment_ids"]),
        trainer=trainer,
        programs=Programs(Hosts(MemoryClient.hub(1)[0]), mesh),
    )
    columns = {"tokens": rows, "segment_ids": filled[:, None] * numbers}
    batch = {name: place(column, NamedSharding(mesh, batch_spec(mesh))) for name, column in columns.items()}
    program.compile(model, batch)
    computed = np.asarray(program(model, batch))
    assert not computed[~filled].any(), "a model would give them some"
    with jax.set_mesh(mesh):
        whole = jax.jit(objective.answer_logprobs, out_shardings=NamedSharding(mesh, P()))(model, answers)
    in_answers = np.pad(computed, ((0, 0), (1, 0)))[filled].reshape(-1, 8)[:, 1:]
    np.testing.assert_allclose(in_answers, whole, rtol=1e-6, atol=1e-6)
