"""The package as its users get it: what is in it, what it needs, and that it works without anything else."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lockstep
from tests.fake_cloud.commands import LOADER
from tests.isolation import COMPILED_FAST
from tests.package.clean_env import asked_for, make_clean_env, metadata_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOT_ASKED_FOR = {"wandb", "levanter", "lm_eval", "pyarrow", "gcsfs", "libtpu", "torch", "pytest", "matplotlib"}

KEPT = ("HOME", "LANG", *LOADER, "TMPDIR", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")

RIGHT = """
import jax
import lockstep
from lockstep import Completion, Engine, EngineConfig, InferenceEvalConfig, Request, SampleCallback, SamplingParams
from lockstep.hosts import Hosts
from transformers import PreTrainedTokenizerBase

config = InferenceEvalConfig(prompts=["What is 12 plus 7?"], eval_every=10, max_new_tokens=16, metrics=["exact_match"])
params = SamplingParams(max_new_tokens=8, temperature=0.7)
reveal_type(config.eval_every)
reveal_type(params.temperature)

def answers(mesh: jax.sharding.Mesh, model: object, hosts: Hosts) -> list[tuple[int, ...]]:
    engine = Engine(EngineConfig(max_seq_len=128), mesh)
    requests = [Request(prompt_id=number, prompt_tokens=(1, 2, 3), params=params) for number in range(4)]
    completions = engine.generate(model, requests, hosts=hosts)
    reveal_type(completions)
    reveal_type(completions[0].finish_reason)
    return [completion.tokens for completion in completions]

def sampler(tokenizer: PreTrainedTokenizerBase) -> SampleCallback:
    return SampleCallback(config, tokenizer, output_dir="runs/mine")

def main() -> int:
    hosts = lockstep.start(lockstep.DistributedConfig())
    reveal_type(hosts.is_leader)
    return 0

if __name__ == "__main__":
    lockstep.run_main(main)
"""
REVEALED = ["int", "float", "list[lockstep.types.Completion]", "lockstep.types.FinishReason", "bool"]
WRONG = """
import lockstep

lockstep.InferenceEvalConfig(prompts=["a"], eval_evry=10)
lockstep.SamplingParams(max_new_tokens="8")
lockstep.Request(prompt_id=0, prompt_tokens=[1, 2], params=lockstep.SamplingParams(max_new_tokens=8))
lockstep.Enigne
def length(completion: lockstep.Completion) -> str:
    return len(completion.tokens)
"""


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Source archive and wheel as a release makes them: the wheel from what is in the archive."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def programs(built, tmp_path_factory):
    return make_clean_env(built[1], tmp_path_factory.mktemp("environment"))


def run(programs, directory, *command, **environment):
    """Run a command of the environment as its user does, away from the checkout."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return subprocess.run(
        [str(programs / command[0]), *command[1:]],
        cwd=directory,
        env={**kept, "PATH": f"{programs}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[1]).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {name.removeprefix("src/") for name in tracked("src")}
    assert {"lockstep/py.typed", "lockstep/main/demo.yaml", "lockstep/report/html/page.html.j2"} <= package
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_builds_the_package_and_has_what_a_packager_reads(built):
    names = {name.partition("/")[2] for name in tarfile.open(built[0]).getnames()}
    assert {*tracked("src"), "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "data", "docs"))]


def test_what_the_package_says_of_itself(built):
    wheel = metadata_of(built[1])
    said = wheel.metadata
    assert said["Requires-Python"] == ">=3.12" and said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown" and said["Description"].startswith("# Lockstep")
    # No address is made up: the package names one when there is one.
    assert not {"Project-URL", "Home-page", "Author", "Author-email"} & set(said)
    assert not any(re.match(r"wandb|pyarrow|levanter|gcsfs", text) for text in wheel.requires if "extra ==" not in text)


def test_it_works_with_what_it_asks_for_and_nothing_else(programs, tmp_path):
    look = f"import importlib.util as u; print([name for name in {sorted(NOT_ASKED_FOR)} if u.find_spec(name)])"
    assert run(programs, tmp_path, "python", "-c", look).stdout == "[]\n"
    shown = run(programs, tmp_path, "lockstep", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^  demo +train a small model", shown.stdout, re.MULTILINE)
    looked = run(programs, tmp_path, "lockstep", "doctor", JAX_PLATFORMS="cpu")
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert "Traceback" not in looked.stdout + looked.stderr


def test_it_takes_at_most_900_mib_with_all_that_it_asks_for(built):
    """Python's bytecode, which pip writes too, is about as large as the source."""
    total = Path(built[1]).stat().st_size
    for distribution in asked_for(metadata_of(built[1]).requires or ()).values():
        for file in distribution.files or ():
            place = Path(str(distribution.locate_file(file)))
            if file.suffix != ".pyc" and place.is_file():
                total += place.stat().st_size * (2 if file.suffix == ".py" else 1)
    assert total < 900 * 2**20, f"{total / 2**20:.0f} MiB"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_demo_trains_shows_samples_and_says_what_to_do_next(programs, tmp_path, processes):
    words = ["--steps", "1", "--processes", str(processes)]
    done = run(programs, tmp_path, "lockstep", "demo", *words, XLA_FLAGS=COMPILED_FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "lockstep-demo" / "runs").iterdir()
    assert f"process 0 of {processes}" in done.stdout and "what the model says after 1 steps" in done.stdout
    assert "\x1b" not in done.stdout and "Traceback" not in done.stdout
    closing = done.stdout[done.stdout.index("0 of 8 answers were right before the first step") :]
    # What it says to do next works as it stands.
    for program in ("report",) if processes == 1 else ("report", "sample"):
        (line,) = [line for line in closing.splitlines() if line.startswith(f"    lockstep {program} ")]
        then = run(programs, tmp_path, "python", "-c", f"import os; os.execl('/bin/sh', 'sh', '-c', {line!r})")
        assert then.returncode == 0, line + then.stdout + then.stderr
    assert (run_dir / "report.html").is_file()


def test_a_configuration_that_names_wandb_says_so_before_anything_is_read(programs, tmp_path):
    arguments = ["--tokenizer", "nowhere", "--data.train_urls", "[nowhere.jsonl]", "--model.type", "llama"]
    words = [*arguments, "--trainer.tracker.type", "wandb"]
    done = run(programs, tmp_path, "lockstep", "train-lm", *words, JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    assert "the tracker is wandb, which cannot be imported" in done.stderr
    assert "pip install 'jax-lockstep[wandb]'" in done.stderr and "nowhere" not in done.stderr


def check_types(programs, directory, text):
    (directory / "theirs.py").write_text(text)
    cache = ROOT / "build" / "mypy-of-a-user"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(programs / "python")]
    command += ["--cache-dir", str(cache), "theirs.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
    return done.stdout.splitlines()


@pytest.mark.nightly
def test_a_users_strict_mypy_knows_the_types(programs, tmp_path):
    *found, last = check_types(programs, tmp_path, RIGHT + "\n".join(f"lockstep.{name}" for name in lockstep.__all__))
    assert last == "Success: no issues found in 1 source file"
    assert [re.search(r'Revealed type is "(.*)"', line)[1].replace("builtins.", "") for line in found] == REVEALED


@pytest.mark.nightly
def test_a_users_mypy_sees_what_is_wrong(programs, tmp_path):
    *found, _ = check_types(programs, tmp_path, WRONG)
    assert [re.search(r":(\d+): error: .*\[([\w-]+)\]", line).groups() for line in found if "error:" in line] == [
        ("4", "call-arg"),
        ("5", "arg-type"),
        ("6", "arg-type"),
        ("7", "attr-defined"),
        ("9", "return-value"),
    ]


@pytest.mark.nightly
def test_pip_installs_it_and_the_whole_demo_runs(built):
    command = [ROOT / "scripts" / "try_wheel.sh", sys.executable, built[1], "-c", ROOT / "constraints.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
