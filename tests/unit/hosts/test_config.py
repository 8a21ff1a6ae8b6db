"""How a process finds the others, how many there must be, which GPUs it has, and what all must have the same."""

import dataclasses
import importlib.metadata
import os

import draccus
import jax
import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, environment
from lockstep.hosts.config import check_count, config_digest, environment_flag, local_gpus


@dataclasses.dataclass(frozen=True)
class Trainer:
    """As much of a trainer's configuration as its digest needs."""

    distributed: DistributedConfig
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    trainer: Trainer


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"timeout_s": 0}, "distributed.timeout_s is 0; it must be more than 0 seconds"),
        ({"initialization_timeout_s": -1}, "distributed.initialization_timeout_s is -1"),
        ({"require_process_count": 0}, "distributed.require_process_count is 0; it must be at least 1"),
        ({"num_processes": 0}, "distributed.num_processes is 0"),
    ],
)
def test_config_refuses(config, text):
    with pytest.raises(ConfigError, match=text):
        DistributedConfig(**config)


def test_how_long_a_start_may_take_is_the_launchers_unless_it_is_given(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_INITIALIZATION_TIMEOUT_S", raising=False)
    assert DistributedConfig().initialization_timeout_s == 300
    monkeypatch.setenv("LOCKSTEP_INITIALIZATION_TIMEOUT_S", "1800")
    assert DistributedConfig().initialization_timeout_s == 1800
    assert DistributedConfig(initialization_timeout_s=60).initialization_timeout_s == 60


def test_required_counts_that_are_met(monkeypatch):
    monkeypatch.setenv("REQUIRE_MULTIHOST", "1")
    monkeypatch.setenv("REQUIRE_JAX_PROCESS_COUNT", "4")
    check_count(DistributedConfig(require_process_count=4, require_multihost=True), 4)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")  # the configuration's number is that of a slice
    check_count(DistributedConfig(require_process_count=2), 4)
    with pytest.raises(ConfigError, match="this job has 2 process.*require_process_count requires 4"):
        check_count(DistributedConfig(require_process_count=2), 2)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES")
    monkeypatch.setenv("REQUIRE_MULTIHOST", "0")
    monkeypatch.setenv("REQUIRE_JAX_PROCESS_COUNT", "")
    check_count(DistributedConfig(), 1)


def test_config_is_read_by_draccus():
    fields = {"require_multihost": True, "require_process_count": 8, "timeout_s": 60}
    config = draccus.decode(DistributedConfig, fields)
    assert (config.require_multihost, config.require_process_count, config.timeout_s) == (True, 8, 60.0)


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_processes_is_refused_be_it_smaller_or_larger(count):
    with pytest.raises(ConfigError, match=rf"this job has {count} process\(es\), but .*_count requires 4"):
        check_count(DistributedConfig(require_process_count=4), count)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("false", False), ("", False), (None, False)])
def test_a_flag_says_yes_or_no(monkeypatch, text, value):
    monkeypatch.delenv("FLAG", raising=False)
    if text is not None:
        monkeypatch.setenv("FLAG", text)
    assert environment_flag("FLAG") == value


def test_the_digest_of_a_configuration_leaves_out_what_tells_processes_apart():
    def digest(number, seed=0):
        return config_digest(TrainingJob(trainer=Trainer(distributed=DistributedConfig(process_id=number), seed=seed)))

    assert digest(0) == digest(1) != digest(0, seed=1)


EIGHT = "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("task", "visible", "gpus"),
    [
        # Two nodes of eight GPUs (--gpus-per-node=8). One task per node has them all, and JAX's rule is the first.
        ({"NTASKS": 2, "PROCID": 1, "LOCALID": 0, "NODEID": 1, "STEP_TASKS_PER_NODE": "1(x2)"}, EIGHT, []),
        ({"NTASKS": 2, "PROCID": 1, "LOCALID": 0, "STEP_NUM_NODES": 2}, EIGHT, []),
        # One task per GPU: all see eight, or (--gpus-per-task=1) each its own, which is 0.
        ({"NTASKS": 16, "PROCID": 11, "LOCALID": 3, "NODEID": 1, "STEP_TASKS_PER_NODE": "8(x2)"}, EIGHT, [3]),
        ({"NTASKS": 16, "PROCID": 11, "LOCALID": 3, "STEP_TASKS_PER_NODE": "8(x2)", "GPUS_ON_NODE": 8}, "0", []),
        ({"NTASKS": 16, "PROCID": 11, "LOCALID": 3, "STEP_TASKS_PER_NODE": "8(x2)"}, "3", []),
        # Equal parts; nodes that have other numbers of tasks; a container that does not say what is visible.
        (
            {"NTASKS": 4, "PROCID": 3, "LOCALID": 1, "STEP_TASKS_PER_NODE": "2(x2)", "GPUS_ON_NODE": 8},
            EIGHT,
            [4, 5, 6, 7],
        ),
        ({"NTASKS": 4, "PROCID": 3, "LOCALID": 1, "STEP_TASKS_PER_NODE": "2(x2)", "GPUS_ON_NODE": 8}, "4,5,6,7", []),
        ({"NTASKS": 5, "PROCID": 4, "LOCALID": 0, "NODEID": 2, "TASKS_PER_NODE": "2(x2),1"}, EIGHT, []),
        ({"NTASKS": 16, "PROCID": 11, "LOCALID": 3, "STEP_TASKS_PER_NODE": "8(x2)"}, "", [3]),
        ({"NTASKS": 16, "PROCID": 11, "LOCALID": 3, "STEP_NUM_NODES": 2}, EIGHT, [3]),
        # Not a step of Slurm: a login node, and the shell of an allocation.
        ({}, EIGHT, None),
        ({"JOB_ID": 7, "NNODES": 2}, EIGHT, None),
    ],
)
def test_a_task_of_slurm_has_all_gpus_of_its_node_or_its_part(monkeypatch, task, visible, gpus):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in task.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == gpus
    if task.get("NTASKS"):
        assert local_gpus(task["PROCID"], task["NTASKS"]) == gpus
        assert local_gpus(task["PROCID"] + 1, task["NTASKS"]) is None, "processes of the user's own inside a task"
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "5")
    assert local_gpus() is None


def test_gpus_that_the_tasks_of_a_node_cannot_share_are_refused(monkeypatch):
    for name, value in {"LOCALID": "0", "PROCID": "0", "NTASKS": "3", "TASKS_PER_NODE": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ConfigError, match=r"3 tasks of this node share 4 GPUs \(0,1,2,3\).*--ntasks-per-node=4\) or"):
        local_gpus()


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)


def test_versions_and_source_are_named():
    found = environment()
    assert found["jax version"] == jax.__version__
    assert len(found["code of lockstep"]) == 64 and {"jaxlib version", "libtpu version"} <= found.keys()


def test_versions_of_what_finds_tokens_are_named():
    found = environment()
    for name in ("numpy", "transformers", "tokenizers"):
        assert found[f"{name} version"] == importlib.metadata.version(name)


def test_each_flag_has_an_entry_of_its_own(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=2")
    new = dict(environment().items() - before.items())
    assert new == {"XLA_FLAGS --xla_a": "1", "XLA_FLAGS --xla_b": "set", "LIBTPU_INIT_ARGS --xla_a": "2"}


def test_a_directory_for_dumps_may_differ(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/process-3")
    assert environment() == before


def test_an_option_that_changes_programs_is_seen():
    before = environment()
    with jax.default_matmul_precision("highest"):
        assert environment()["compile option jax_default_matmul_precision"] == "highest"
    assert environment() == before
