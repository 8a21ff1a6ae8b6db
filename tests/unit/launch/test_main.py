"""The launcher's sub-commands, and what it needs to run."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.exits import PREFLIGHT
from lockstep.launch import BACKENDS, main
from lockstep.launch.backend import Backend, LaunchError
from lockstep.launch.main import make_backend

ROOT = Path(__file__).parents[3]
PACKAGE = Path(lockstep.__file__).parent


ALONE = ("config_fields", "errors", "exits", "files", "job_key", "json_text", "plugins", "printable", "redact")
"""The modules beside its own that the launcher may import."""


def sources():
    alone = (PACKAGE / f"{name}.py" for name in ALONE)
    return [*(PACKAGE / "launch").rglob("*.py"), *alone, ROOT / "infra" / "launch.py"]


def imported(node):
    """The modules of an import; ``from lockstep import exits`` is one of ``lockstep.exits``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"lockstep.{each.name}" for each in node.names] if node.module == "lockstep" else [node.module or ""]
    return []


def test_the_launcher_needs_the_standard_library_alone():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = imported(node)
            for name in names:
                own = name.removeprefix("lockstep.").split(".")[0] in {*ALONE, "launch"}
                assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path}: {name}"
    code = "import sys; sys.path.insert(0, 'src'); import lockstep.launch; print({'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_backend_of_the_table_is_whole(name, capsys):
    backend: Backend = make_backend(name, BACKENDS)
    methods = ("add_options", "run", "dry_run", "status", "logs", "stop", "delete")
    assert all(callable(getattr(backend, method)) for method in methods)
    with pytest.raises(SystemExit) as end:
        main(["--backend", name, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "--dry-run" in shown and "example" in shown.lower()


class Recorder:
    """A backend that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def add_options(self, parser):
        parser.add_argument("--fails", action="store_true")

    def run(self, options):
        self.calls.append(("run", options.command))
        if options.fails:
            raise LaunchError("nothing there.", PREFLIGHT)
        return 7

    def dry_run(self, options):
        self.calls.append(("dry_run", options.command))
        return 0

    def logs(self, job, *, follow):
        self.calls.append(("logs", job.name, follow))
        return 0

    def __getattr__(self, name):
        def method(job):
            self.calls.append((name, job.name))
            return 3

        return method


def test_a_job_has_a_backend_of_its_own(tmp_path, monkeypatch):
    """What one notes of its job (a slice that it has acquired, whether somebody has ended it) is not another's."""
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path))
    made = []

    class Noted(Recorder):
        def __init__(self):
            super().__init__()
            made.append(self)

    for word in ("x", "y"):
        assert main(["--", word], {"local": Noted}) == 7
    assert [backend.calls for backend in made if backend.calls] == [[("run", ["x"])], [("run", ["y"])]]
    assert all(make_backend(name, BACKENDS) is not make_backend(name, BACKENDS) for name in BACKENDS)


def test_sub_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path))
    backend = Recorder()
    table = {"local": lambda: backend}
    assert main(["--", "x"], table) == main(["run", "--", "x"], table) == 7
    assert main(["--dry-run", "--", "x"], table) == 0
    assert main(["--fails", "--", "x"], table) == PREFLIGHT and capsys.readouterr().err == "error: nothing there.\n"
    record = {"name": "job", "backend": "local", "command": ["x"], "options": {}, "attempts": [], "notes": {}}
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text(json.dumps({**record, "deleted": False}))
    assert [main([word, "job"], table) for word in ("status", "stop", "delete", "logs")] == [3, 3, 3, 0]
    assert main(["logs", "-f", "job"], table) == 0
    assert backend.calls[4:] == [
        *(("status", "job"), ("stop", "job"), ("delete", "job")),
        *(("logs", "job", False), ("logs", "job", True)),
    ]
    assert main(["status", "jab"], table) == 1 and "error: no job 'jab'" in capsys.readouterr().err
    assert main(["status", "job"], {}) == 1 and "has the backend 'local'" in capsys.readouterr().err


def test_lockstep_launch_is_the_same_and_loads_no_jax():
    code = "import sys; sys.argv[1:] = ['launch', '--', 'nosuchprogram']; from lockstep.main.cli import main\n"
    code += "try: main()\nexcept SystemExit as end: print(end.code, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "127 False\n", done.stderr
