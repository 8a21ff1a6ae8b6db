"""Tests mirror the package: ``src/lockstep/a/b.py`` is tested in ``tests/unit/a/test_b.py``."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, UNIT = ROOT / "src" / "lockstep", ROOT / "tests" / "unit"

REPOSITORY = {
    "test_api_docs.py",
    "test_benchmark_files.py",
    "test_bonsai_example.py",
    "test_config_heads.py",
    "test_demo_data.py",
    "test_docs.py",
    "test_engine_page.py",
    "test_extras.py",
    "test_first_pod.py",
    "test_grpo_benchmark.py",
    "test_imports.py",
    "test_mirror.py",
    "test_public_names.py",
    "test_snippets.py",
    "test_release.py",
    "test_train_step_benchmark.py",
    "test_troubleshooting.py",
}
"""Tests of what is in the repository beside the package."""

COVERED_BY = {
    # The launcher: protocols, the table, and what a whole run needs all of.
    **{
        f"launch/{part}.py": "tests/unit/launch/test_attempt.py"
        for part in ("agent/files", "agent/follow", "agent/supervisor", "console", "follower")
    },
    **{
        f"launch/{part}.py": "tests/unit/launch/test_worker_jobs.py"
        for part in ("backend", "worker_backend", "workers")
    },
    "launch/backends.py": "tests/unit/launch/test_main.py",
    "launch/connection.py": "tests/unit/launch/agent/test_main.py",
    "launch/processes.py": "tests/unit/launch/test_local.py",
    # What sees the launches of a process, which only a whole run shows.
    **{f"check/{part}.py": "tests/multiprocess/test_check.py" for part in ("inject", "run")},
    "check/_jax.py": "tests/unit/check/test_launches.py",
    # Protocols and tables, which have no behaviour of their own.
    "models/attention/base.py": "tests/unit/models/attention/test_reference.py",
    "launch/output_filter.py": "tests/unit/launch/test_task_script.py",
    "models/rotary.py": "tests/unit/models/test_llama.py",
    "models/hf/save_source.py": "tests/unit/models/hf/test_save.py",
    "models/hf/fingerprint.py": "tests/unit/batch_inference/test_checkpoint.py",
    "models/attention/tpu_block_table.py": "tests/tpu_compile/test_blocks.py",
    "engine/rollout_engine.py": "tests/unit/engine/test_round.py",
    "engine/capacity_fields.py": "tests/unit/engine/test_sampling_fields.py",
    "main/plan/draft_bytes.py": "tests/tpu_compile/test_drafts.py",
    "main/plan/train_state.py": "tests/unit/main/plan/test_train_step.py",
    "training/data/chunk_builder.py": "tests/unit/training/data/test_records.py",
    "training/objectives/parts.py": "tests/unit/training/objectives/test_lm.py",
    "training/rl/rollout_config.py": "tests/unit/engine/test_sampling_fields.py",
    # One kind of reward each.
    **{
        f"training/rl/rewards/{kind}.py": "tests/unit/training/rl/rewards/test_rewards.py"
        for kind in ("config", "exact_match", "format", "function", "gsm8k", "length", "overlong", "regex")
    },
    # Programs of the decoder, which only the whole engine runs.
    "engine/decoder/build.py": "tests/unit/engine/test_engine.py",
    "engine/decoder/copy_pages.py": "tests/unit/engine/decoder/test_transformer.py",
    "engine/decoder/prefill.py": "tests/unit/engine/decoder/test_transformer.py",
    "placement/device/float8.py": "tests/unit/models/attention/test_kv_dtype.py",
    "engine/prepare.py": "tests/unit/engine/test_engine.py",
    # Steps of a whole round, run or plan.
    "batch_inference/generate.py": "tests/unit/batch_inference/test_run.py",
    **{
        f"training/rl/{part}.py": "tests/unit/training/rl/test_rollouts.py"
        for part in ("answer_rows", "logprob_columns", "rollout_report")
    },
    "main/plan/planner.py": "tests/tpu_compile/test_plan.py",
    "main/doctor/layout_rounds.py": "tests/unit/main/doctor/test_self_test.py",
    # Processes of tests, which only several of them show.
    "testing/command.py": "tests/multiprocess/test_hosts.py",
    **{f"testing/{part}.py": "tests/multiprocess/test_pool.py" for part in ("group", "pool", "worker")},
    # What both of Google's backends share.
    "launch/pod.py": "tests/unit/launch/test_tpu_vm.py",
    "launch/google.py": "tests/unit/launch/test_tpu_vm_backend.py",
    # Commands and runs: a configuration and a call.
    "main/train.py": "tests/multiprocess/test_demo.py",
    "training/run/config.py": "tests/unit/training/run/test_grpo.py",
    "training/run/preference.py": "tests/multiprocess/test_train_preference.py",
    "training/run/run.py": "tests/multiprocess/test_train_simpo.py",
    "main/demo_data.py": "tests/unit/test_demo_data.py",
    "main/plan_command.py": "tests/unit/main/test_plan_workload.py",
    "main/sample.py": "tests/multiprocess/test_sample.py",
}
COVERED_BY |= {
    path.relative_to(SOURCE).as_posix(): "tests/unit/models/families/test_family.py"
    for path in (SOURCE / "models/families").glob("*.py")
    if path.stem not in ("__init__", "family", "registry")
}
"""The test file of each module that has none of its name."""


def mirror_of(module: str) -> Path:
    """The test file of a module, given by its path in the package."""
    path = Path(module)
    return UNIT / path.parent / f"test_{path.name}"


def modules() -> list[str]:
    """Every module, by its path in the package; a package's face has nothing to test."""
    paths = (path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    return sorted(path.relative_to(SOURCE).as_posix() for path in paths)


def test_every_test_file_is_that_of_a_module_or_of_its_package():
    orphans = []
    for test in UNIT.rglob("test_*.py"):
        tested = SOURCE / test.relative_to(UNIT).with_name(test.name.removeprefix("test_"))
        of_package = tested.stem == tested.parent.name and tested.parent.is_dir()
        if not (tested.exists() or of_package or test.parent == UNIT and test.name in REPOSITORY):
            orphans.append(test.relative_to(ROOT).as_posix())
    assert not orphans, "name these after the module that they test, or after its package"


def test_every_module_has_its_test_file():
    missing = [module for module in modules() if module not in COVERED_BY and not mirror_of(module).exists()]
    assert not missing, "write their tests, or say in COVERED_BY which file has them"


def test_every_row_of_the_table_names_a_module_and_a_test_file():
    assert set(COVERED_BY) <= set(modules())
    assert not [test for test in COVERED_BY.values() if not (ROOT / test).is_file()]


def test_no_row_of_the_table_has_been_overtaken():
    assert not [module for module in COVERED_BY if mirror_of(module).exists()]
