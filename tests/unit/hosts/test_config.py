"""How a process finds the others, and how many there must be."""

import draccus
import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig
from lockstep.hosts.config import check_count


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
