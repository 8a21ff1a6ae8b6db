"""Launches that fail, and the largest microbatch that fits, as the compiler says, agreed on by all hosts."""

from types import SimpleNamespace

import jax
import pytest

from lockstep.errors import ConfigError, HbmError, HostError
from lockstep.hosts import Ledger, MemoryClient
from lockstep.placement import make_mesh
from lockstep.training import TrainerConfig
from lockstep.training.step.programs import Programs, compile_largest
from tests.multiprocess.harness import run_threads
from tests.unit.training.loop.test_trainer import STEPS, init, make_trainer, rows


class Step:
    """A train step that needs 100 bytes and 10 per row."""

    compiled = ()

    def __init__(self, size, refused=()):
        self.size, self.refused = size, refused

    def compile(self, *arguments, ledger):
        Step.compiled += (self.size,)
        if self.size in self.refused:
            raise HbmError("too large", needed=0)
        return {"digest": str(self.size)}

    def needed_bytes(self):
        return 100 + 10 * self.size


STATE = jax.ShapeDtypeStruct((25,), "float32")


def choose(hosts, memory, n_rows=64, refused=()):
    programs = Programs(hosts, make_mesh())
    return compile_largest(programs, n_rows, lambda parts: Step(n_rows // parts, refused), lambda step: [STATE], memory)


def alone(memory, **values):
    Step.compiled = ()
    return run_threads(lambda hosts: choose(hosts, memory, **values).size, 1)[0]


def test_the_largest_that_fits_is_found_without_compiling_what_is_far_too_large():
    assert alone(740) == 64 and Step.compiled == (64,)
    assert alone(190) == 8 and Step.compiled == (64, 16, 8)


def test_a_step_that_the_compiler_refuses_is_too_large():
    assert alone(2**40, refused=(64, 32)) == 16


def test_the_host_with_the_least_memory_decides():
    assert run_threads(lambda hosts: choose(hosts, [740, 430][hosts.index]).size, 2) == [32, 32]


def test_the_host_whose_step_needs_most_decides():
    class Larger(Step):
        def needed_bytes(self):
            return 100 + 20 * self.size

    def body(hosts):
        kind, programs = [Step, Larger][hosts.index], Programs(hosts, make_mesh())
        return compile_largest(programs, 64, lambda parts: kind(64 // parts), lambda step: [STATE], 740).size

    assert run_threads(body, 2) == [32, 32]


def test_where_nothing_fits_the_error_says_what_one_row_needs():
    with pytest.raises(ConfigError, match="needs 110 B per device even with 1 of 64 rows at a time, .* 105 B"):
        alone(105)


def run(parallelism, **values):
    """The losses of a run on 2 x 2 devices, and the bytes that its step needs."""
    trainer = make_trainer(mesh_shape="1,2,2", train_batch_size=256, per_device_parallelism=parallelism, **values)
    found = []
    trainer.add_hook(lambda info: found.append(info.loss))
    trainer.train(init(trainer), rows(256))
    assert trainer.train_step_traces == 1 and len(found) == STEPS
    return found, trainer._step.needed_bytes()


def test_a_run_takes_the_microbatches_that_fit_and_gives_their_losses(caplog):
    caplog.set_level("INFO")
    at_once, all_rows = run(-1)
    fewer, some_rows = run(32)
    assert some_rows < all_rows and fewer != at_once
    assert run("auto") == (at_once, all_rows)
    assert run("auto", memory_bytes_per_device=some_rows) == (fewer, some_rows)
    assert "per_device_parallelism auto: 32 of 128 rows at a time" in caplog.text


def test_values_that_cannot_work():
    with pytest.raises(ConfigError, match="per_device_parallelism is 0; it must be at least 1, or -1 .* or auto"):
        TrainerConfig(per_device_parallelism=0)
    with pytest.raises(ConfigError, match=r"memory_bytes_per_device is 5; it is for per_device_parallelism: auto"):
        TrainerConfig(memory_bytes_per_device=5)


def fail(count: int) -> None:
    client, ledger = MemoryClient.hub(4)[1], Ledger()
    missing = " Missing: process 2."
    hosts = SimpleNamespace(count=count, index=1, missing=lambda: missing, timeout_s=60.0, client=client, ledger=ledger)
    with Programs(hosts, make_mesh()).launching("train_step", 7):  # type: ignore[arg-type]  # a stand-in
        raise jax.errors.JaxRuntimeError("connection closed by peer")


def test_a_process_of_several_says_who_is_missing_and_what_the_runtime_said() -> None:
    with pytest.raises(HostError) as error:
        fail(4)
    assert str(error.value).startswith("the train step after 7 steps failed on process 1 of 4. Missing: process 2. If")
    assert str(error.value).endswith("The runtime says: connection closed by peer")


def test_with_one_process_the_runtimes_own_error_is_raised() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="^connection closed by peer$"):
        fail(1)
