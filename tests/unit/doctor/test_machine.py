"""Disks, variables and what is shown of them."""

import collections
import copy

import pytest
from jax._src.config import bool_env

from lockstep.doctor import machine
from lockstep.doctor.machine import (
    check_disks,
    check_host,
    check_huge_pages,
    check_variables,
    check_versions,
    compare,
    compare_clocks,
    host_facts,
    judge_cache,
    run_paths,
    run_variables,
)

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


def test_small_pages_are_a_warning_where_there_are_chips(tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    (found,) = check_huge_pages(str(file), chips=4)
    assert found.outcome == "warning" and "always [madvise] never" in found.text and "echo always >" in found.fix
    assert check_huge_pages(str(file), chips=0) == [] == check_huge_pages(str(tmp_path / "none"), chips=4)
    file.write_text("[always] madvise never\n")
    assert [each.outcome for each in check_huge_pages(str(file), chips=4)] == ["ok"]


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


@pytest.mark.parametrize("value", ["1", "y", "t", "ON", "Yes", "true", "0", "off", "n", "f", "no", "false"])
def test_a_hazard_is_on_where_jax_takes_it_for_true(value, monkeypatch):
    monkeypatch.setenv("JAX_DEBUG_NANS", value)
    (found,) = check_variables({"JAX_DEBUG_NANS": value}, chips=0)
    assert (found.outcome == "fix") == bool_env("JAX_DEBUG_NANS", False)


def test_no_variable_has_a_secret_in_it():
    found = run_variables({"WANDB_PASSWD": "hush", "HF_AUTH": "hush", "WANDB_BASE_URL": "https://me:hush@h/?k=hush"})
    assert found["WANDB_PASSWD"] == found["HF_AUTH"] == "set" and "hush" not in str(found)


INSTALLED = {"jax-lockstep": "0.1.0", "jax": "0.11.1", "jaxlib": "0.11.1", "numpy": "2.3", "libtpu": "0.0.46.3"}
REQUIRED = {
    "jax-lockstep": ["jax<0.12,>=0.11.1", "numpy>=2", "gcsfs>=2025.1; extra == 'gcs'", "pytest>=8; extra == 'dev'"],
    "jax": ["jaxlib<=0.11.1,>=0.11.1", "libtpu==0.0.46.*; extra == 'tpu'", "tomli; python_version < '3.0'"],
}


def check(**changed):
    installed = INSTALLED | changed
    return check_versions(installed.get, lambda name: REQUIRED.get(name, ()))


def test_what_fits_is_one_line():
    (found,) = check()
    assert found.outcome == "ok"
    assert found.text.startswith("jax-lockstep 0.1.0, jax 0.11.1, jaxlib 0.11.1, libtpu 0.0.46.3, Python 3.")
    assert found.text.endswith("; 4 requirements fit")


@pytest.mark.parametrize(
    ("changed", "text", "fix"),
    [
        ({"libtpu": "0.0.30"}, "libtpu 0.0.30 is installed; jax 0.11.1 needs libtpu==0.0.46.*.", "libtpu==0.0.46.*"),
        (
            {"jax": "0.10.2"},
            "jax 0.10.2 is installed; jax-lockstep 0.1.0 needs jax<0.12,>=0.11.1.",
            "jax<0.12,>=0.11.1",
        ),
        ({"jaxlib": None}, "jaxlib is missing; jax needs jaxlib<=0.11.1,>=0.11.1.", "jaxlib<=0.11.1"),
        ({"gcsfs": "2024.1"}, "gcsfs 2024.1 is installed; jax-lockstep 0.1.0 needs gcsfs>=2025.1.", "gcsfs>=2025.1"),
        (
            {"haliax": "1.4", "marin-haliax": "0.2.227"},
            "haliax 1.4 and marin-haliax 0.2.227 install the same modules, over each other.",
            "pip uninstall -y haliax marin-haliax, then pip install marin-haliax==0.2.227",
        ),
    ],
    ids=["libtpu", "jax", "missing", "extra", "twice"],
)
def test_what_does_not_fit_is_named(changed, text, fix):
    (found,) = check(**changed)
    assert (found.outcome, found.text) == ("fix", text)
    assert "pip" in found.fix and fix in found.fix


def test_a_source_tree_is_a_warning():
    (found,) = check(**{"jax-lockstep": None})
    assert found.outcome == "warning" and found.text.startswith("jax-lockstep is not installed as a package")


def test_what_is_installed_here_fits():
    assert [each.outcome for each in check_versions()] == ["ok"]


def facts(count=4):
    return [copy.deepcopy(host_facts("digest")) for _ in range(count)]


def test_hosts_that_are_the_same_are_one_line():
    (found,) = compare(facts())
    assert found.outcome == "ok" and found.text.startswith("4 processes on 1 machine; ")


@pytest.mark.parametrize(
    ("kind", "name", "outcome"),
    [
        ("must", "jax version", "fix"),
        ("must", "configuration", "fix"),
        ("must", "device kind", "fix"),
        ("must", "LIBTPU_INIT_ARGS --xla_tpu_x", "fix"),
        ("should", "variable HF_HUB_OFFLINE", "warning"),
    ],
)
def test_a_host_that_differs_is_named(kind, name, outcome):
    hosts = facts()
    hosts[2][kind][name] = "another"
    (found,) = compare(hosts)
    assert found.outcome == outcome
    assert found.text.startswith(f"{name}: processes 0, 1, 3 (the majority): ") and "process 2: 'another'" in found.text


def test_a_flag_of_one_host_is_seen_in_its_environment(monkeypatch):
    hosts = facts(1)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_y=2")
    (found,) = compare([*hosts, *facts(1)])
    assert found.text == "LIBTPU_INIT_ARGS --xla_tpu_y: process 0: 'not set'; process 1: '2'."


@pytest.mark.parametrize(
    ("times", "outcome", "text"),
    [
        ([100.0, 100.2], "ok", "within 200 ms of each other"),
        ([100.0, 100.1, 103.0], "warning", "they differ by 3.0 s: process 2 by +2.9 s."),
        ([100.0, 100.0, -500.0], "fix", "they differ by 600.0 s: process 2 by -600.0 s."),
    ],
)
def test_clocks(times, outcome, text):
    found = compare_clocks(times)
    assert (found.outcome, found.text) == (outcome, text)


def test_a_cache_of_programs_that_hosts_do_not_share_is_named():
    assert judge_cache("/tmp/cache", [True, True]) == judge_cache("", [True, False]) == []
    (found,) = judge_cache("/tmp/cache", [True, False, False])
    assert found.outcome == "warning" and "another directory on processes 1, 2 than on process 0" in found.text
