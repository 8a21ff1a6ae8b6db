"""Disks, variables and what is shown of them."""

import collections

import pytest

from lockstep.main.doctor import machine
from lockstep.main.doctor.machine import check_disks, check_host, check_variables, run_paths, run_variables

Usage = collections.namedtuple("Usage", "total used free")


def test_the_host_says_what_it_is():
    assert "cores" in check_host().text


@pytest.mark.parametrize(("free", "outcome"), [(1 << 20, "fix"), (2 << 30, "warning"), (50 << 30, "ok")])
def test_a_disk_is_judged_by_what_is_free(free, outcome, monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(100 << 30, 0, free))
    (found,) = check_disks({"run directory": tmp_path / "not" / "yet", "temporary files": tmp_path})
    assert found.outcome == outcome
    assert "of 100.00 GiB free for run directory, temporary files (" in found.text


def test_a_directory_that_cannot_be_written_to_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    found = check_disks({"run directory": tmp_path})
    assert found[0].outcome == "fix" and found[0].text.startswith(f"the run directory {tmp_path} cannot be written")


def test_a_cache_in_a_bucket_is_no_disk():
    assert "compilation cache" not in run_paths(environment={"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"})
    assert "compilation cache" in run_paths(environment={"JAX_COMPILATION_CACHE_DIR": "/cache"})


def test_secrets_and_what_differs_by_nature_are_not_told():
    told = run_variables(
        {
            "WANDB_API_KEY": "hush",
            "HF_TOKEN": "hush",
            "TPU_WORKER_ID": "3",
            "JAX_ENABLE_X64": "1",
            "HOME": "/",
            "XLA_FLAGS": "-",
        }
    )
    assert told == {"WANDB_API_KEY": "set", "HF_TOKEN": "set", "JAX_ENABLE_X64": "1"}


def test_variables_that_no_job_survives_are_found():
    (found,) = check_variables({"JAX_DEBUG_NANS": "True"}, chips=0)
    assert found.outcome == "fix" and found.fix == "unset JAX_DEBUG_NANS."
    (found,) = check_variables({"JAX_PLATFORMS": "cpu"}, chips=4)
    assert found.outcome == "warning" and found.text == "JAX_PLATFORMS is cpu on a machine with 4 TPU chips."
    (found,) = check_variables({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a --b"}, chips=0)
    assert found.text == (
        "1 variable of JAX, TPU, Hugging Face and W&B, 2 compiler flags; compiled programs are not kept "
        "(JAX_COMPILATION_CACHE_DIR)"
    )


def test_no_variable_has_a_secret_in_it():
    found = run_variables({"WANDB_PASSWD": "hush", "HF_AUTH": "hush", "WANDB_BASE_URL": "https://me:hush@h/?k=hush"})
    assert found["WANDB_PASSWD"] == found["HF_AUTH"] == "set" and "hush" not in str(found)
