"""How a process finds the others, and how many there must be."""

import dataclasses

import draccus
import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig
from lockstep.hosts.config import check_count, config_digest, environment_flag


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
