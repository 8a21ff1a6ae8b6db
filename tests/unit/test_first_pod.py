"""docs/first-pod.md: every command of it is typed, in its order, against the fakes of Google's commands."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.launch import parse
from tests import snippets
from tests.fake_cloud.laptop import Laptop
from tests.snippets import commands

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-pod.md").read_text(encoding="utf-8")
KEY = "paste-yours-here-0123456789abcdef"

NOT_TYPED = {
    "gcloud auth login": "opens a browser",
    "gcloud projects": "changes an account, which the fake does not have",
    "gcloud billing": "changes an account, which the fake does not have",
    "gcloud config set": "changes an account, which the fake does not have",
    "gcloud services": "changes an account, which the fake does not have",
    "gcloud storage": "there is no bucket",
    "gcloud compute tpus queued-resources list": "for people; the test looks at the state of the fake instead",
    "pip install": "downloads",
    "hf ": "downloads",
    "make setup-tests": "downloads",
    ".venv/bin/lockstep plan": "compiles for a minute; tests/tpu_compile/test_planner.py plans this configuration",
}
"""What a fake cannot run, and why."""

UV = """#!/bin/sh
# Instead of uv: an environment has a lockstep and a python that print their arguments, and fail without their file.
case "$1" in
  build)
    while [ "$1" != --out-dir ]; do shift; done
    number=$(sed -n 's/^version = "\\(.*\\)"$/\\1/p' "$3/pyproject.toml")
    mkdir -p "$2" && touch "$2/jax_lockstep-$number-py3-none-any.whl" ;;
  venv) for last in "$@"; do :; done; mkdir -p "$last/bin" ;;
  pip)
    while [ "$1" != --python ]; do shift; done
    for name in lockstep python; do
      printf '#!/bin/sh\\necho "%s $*"\\n' $name > "$(dirname "$2")/$name"
      echo 'for word in "$@"; do case $word in *.yaml) [ -f "$word" ] || exit 66; esac; done' >> "$(dirname "$2")/$name"
      chmod +x "$(dirname "$2")/$name"
    done ;;
esac
"""


BLOCKS = [block for block in snippets.BLOCKS if block.page == "docs/first-pod.md" and block.language == "sh"]
OUTPUTS = ("docs/first-pod.md:text:0", "docs/first-pod.md:text:1", "docs/first-pod.md:text:2")


def launches():
    return [line for block in BLOCKS for line in commands(block) if "infra/launch.py" in line]


def typed(line):
    return not line.startswith(tuple(NOT_TYPED))


def test_every_exception_is_of_the_page():
    lines = [line for block in BLOCKS for line in commands(block)]
    assert all(any(line.startswith(start) for line in lines) for start in NOT_TYPED)
    assert sum(map(typed, lines)) > 12


@pytest.mark.parametrize(
    ("text", "package"),
    [("/models/", "gcsfs"), (".parquet", "pyarrow"), ("type: wandb", "wandb"), ("v5p-64", "jax[tpu]")],
)
def test_what_its_configuration_needs_is_installed_on_the_machines(text, package):
    shipped = (ROOT / "config" / "simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml").read_text(encoding="utf-8")
    assert text in PAGE + shipped
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for line in launches() if "my-runs/simpo.yaml" in line]
    assert len(lines) == 2
    for line in lines:
        installed = [one for extra in parse(shlex.split(line)[2:]).extras.split(",") for one in extras[extra]]
        assert any(one.startswith(f"{package}>=") for one in installed), line


def test_the_configuration_for_levanter_reads_only_what_the_page_has_put_into_the_bucket():
    text = (ROOT / "examples" / "levanter_train_lm_v5p_64.yaml").read_text(encoding="utf-8")
    places = set(re.findall(r"gs://YOUR_BUCKET/([\w/-]+)", text))
    made = {place for place in places if place.startswith(("cache/", "checkpoints/"))}
    put = set(re.findall(r"gcloud storage cp .* gs://my-bucket/([\w/-]+)/\n", PAGE))
    assert places - made == {"models/Meta-Llama-3-8B-Instruct", "data/ultrafeedback_binarized/train_prefs-"}
    assert all(any(place.startswith(each) for each in put) for place in places - made), put
    (line,) = [line for line in launches() if "levanter" in line]
    options = parse(shlex.split(line)[2:])
    assert [str(path) for path in options.sync] == ["examples", "my-runs"] and not re.search(r"[\s\"\[]data/", text)
    assert options.extras == "levanter,tpu,gcs"


class LaptopWithClone(Laptop):
    """A laptop with a clone, and a stand-in for uv."""

    def __init__(self, directory):
        super().__init__(directory)
        (directory / "bin" / "uv").write_text(UV)
        (directory / "bin" / "uv").chmod(0o755)
        (directory / "bin" / "python3.12").symlink_to(sys.executable)
        for name in ("config", "data", "examples", "infra"):
            (directory / "clone" / name).parent.mkdir(exist_ok=True)
            if name == "infra":
                (directory / "clone" / name).symlink_to(ROOT / name)
            else:
                ignored = shutil.ignore_patterns("__pycache__", "runs", "*.pt")
                shutil.copytree(ROOT / name, directory / "clone" / name, ignore=ignored)

    def type(self, line):
        """Type a line; the launcher looks at the cloud more often than by default, and two machines are a pod."""
        line = line.replace("infra/launch.py --tpu_name", "infra/launch.py --poll_s 0.05 --tpu_name")
        line = line.replace("--tpu_type v5p-64", "--tpu_type v5p-16")
        return subprocess.run(
            ["bash", "-c", line], cwd=self.directory / "clone", env=self.environment, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip


@pytest.mark.nightly  # in make slow: unit/launch/test_google.py
def test_the_page_is_typed(tmp_path):
    laptop, outputs, compared = LaptopWithClone(tmp_path), [], []
    for block in BLOCKS:
        output = ""
        for line in filter(typed, commands(block)):
            done = laptop.type(line)
            output += done.stdout + done.stderr
            assert done.returncode == 0, f"{line}\n{output}"
        for name in OUTPUTS:
            if snippets.commands_before(name) == commands(block):
                assert snippets.lacking(name, output) is None, output
                compared.append(name)
        outputs.append(output)
    assert tuple(compared) == OUTPUTS
    printed = "\n".join(outputs)
    for worker in range(4):
        assert f"[{worker}] lockstep train-simpo --config_path config/simpo_tiny.yaml" in printed
        assert f"[{worker}] lockstep doctor --self-test --json self-test.json" in printed
    for worker in range(2):
        assert f"[{worker}] lockstep train-simpo --config_path my-runs/simpo.yaml --trainer.run_id simpo-1" in printed
        assert f"[{worker}] python examples/levanter_train_lm.py --config_path my-runs/levanter.yaml" in printed
    # Deleted before the part for users of Levanter, which makes the slice again.
    assert len(laptop.cloud.calls("queued-resources create my-pod")) == 2
    assert len(laptop.cloud.calls("queued-resources delete")) == 2
    mine = laptop.directory / "home" / "lockstep.env"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != mine]
    assert mine.stat().st_mode & 0o777 == 0o600 and KEY in mine.read_text()
    assert KEY not in printed and not [path for path in written if KEY.encode() in path.read_bytes()]
