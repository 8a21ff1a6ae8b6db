"""The command line of a job on GKE."""

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import parse
from lockstep.launch.gke_plan import GkePlan


def plan(*words, kind="v6e-16"):
    given = ["--tpu_type", kind] if kind else []
    return GkePlan.of(parse(["--backend", "gke", *given, "--setup", "none", *words, "--", "echo"]))


def test_the_process_count_is_that_of_all_slices():
    assert plan("--slices", "2").job.environment == {"REQUIRE_JAX_PROCESS_COUNT": "8"}
    assert plan("--require-process-count", "3").job.environment == {"REQUIRE_JAX_PROCESS_COUNT": "3"}
    assert plan("--slices", "2").job.pods == 8


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ([], None, "--tpu_type is not given; backend gke needs it"),
        ([], "v6e-17", "--tpu_type is 'v6e-17', which is not the name of a slice"),
        (["--name", "My_Job"], "v6e-8", "Kubernetes makes the pods' host names of it"),
        (["--capacity_type", "reserved"], "v6e-8", "belong together"),
        (["--reservation", "mine"], "v6e-8", "belong together"),
    ],
)
def test_what_does_not_fit_together_is_refused(words, kind, text):
    with pytest.raises(ConfigError, match=text):
        plan(*words, kind=kind)


def test_files_that_are_too_large_for_a_config_map_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").write_bytes(bytes(range(256)) * 8192)
    monkeypatch.setattr("lockstep.launch.gke_plan.MAX_FILES", 1000)
    with pytest.raises(ConfigError, match=r"sync.tar.gz .*a ConfigMap may have 1,000. Leave data out of --sync"):
        plan("--sync", "big").files()
