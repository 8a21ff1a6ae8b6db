"""The command line of a job on GKE."""

import random

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import parse
from lockstep.launch.environment import job_variables
from lockstep.launch.gke_manifest import MAX_PARTS
from lockstep.launch.gke_spec import GkeSpec
from lockstep.launch.setup_vm import ROOT


def plan(*words, kind="v6e-16"):
    given = ["--tpu_type", kind] if kind else []
    return GkeSpec.of(parse(["--backend", "gke", *given, "--setup", "none", *words, "--", "echo"]))


def test_pods_wait_longer_for_each_other_than_processes_of_one_machine():
    assert plan().job.environment["LOCKSTEP_INITIALIZATION_TIMEOUT_S"] == "1800"
    chosen = plan("--env", "LOCKSTEP_INITIALIZATION_TIMEOUT_S=60").job.environment
    assert chosen["LOCKSTEP_INITIALIZATION_TIMEOUT_S"] == "60"


def test_the_process_count_is_that_of_all_slices():
    assert plan("--slices", "2").job.environment == job_variables(8)
    assert plan("--require-process-count", "3").job.environment == job_variables(3)
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


def test_files_of_several_config_maps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(2_500_000))
    job, maps, said = plan("--sync", "big").with_files()
    assert job.parts == len(maps) == 3 and said.startswith("3 ConfigMap(s) with sync.tar.gz 2,5")
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(20_000_000))
    with pytest.raises(ConfigError, match=r"sync.tar.gz 20,.*its ConfigMaps may have 16,000,000. Leave data out of"):
        plan("--sync", "big").with_files()


def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for name in (".env", "a.py"):
        (tmp_path / "code" / name).write_text("x")
    assert "leaves out what looks like keys or passwords: code/.env." in plan("--sync", "code").with_files()[2]


@pytest.mark.slow
def test_the_wheel_of_this_checkout_has_room_to_grow(monkeypatch, tmp_path):
    """With the repository's own configurations and data it takes less than half of what there may be."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--backend", "gke", "--tpu_type", "v6e-16", "--sync", "config", "--sync", "data", "--", "echo"]
    job, _, said = GkeSpec.of(parse(options)).with_files()
    assert 1 <= job.parts <= MAX_PARTS // 2 and ".whl" in said and "sync.tar.gz" in said
