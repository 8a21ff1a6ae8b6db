"""The page of the Python API: every public name has an example, which is run."""

import ast
import doctest
import inspect
import re
import signal
from types import SimpleNamespace

import pytest

import lockstep
from lockstep.report import NoopTracker
from tests.unit.test_docs import PAGES, ROOT, blocks, code_names, script_at

API = script_at("scripts/make_api_docs.py")
NAMES = API.public_names()
SLOW = {
    "lockstep.Engine": "compiles prefill and decode",
    "lockstep.SampleCallback": "compiles prefill and decode",
    "lockstep.audit": "compiles prefill, decode and the training forward",
    "lockstep.models.check_reader": "compiles three forward passes",
    "lockstep.testing.run_processes": "starts two processes",
    "lockstep.training.Trainer": "compiles a train step",
    "lockstep.models.load_hf": "compiles a program for each parameter",
    "lockstep.models.save_hf": "compiles a program for each parameter",
}
"""Examples that `make slow` runs, and why."""


@pytest.fixture(scope="module")
def setup():
    """What the page says that its examples come after, and the script of a Levanter user."""
    handler = signal.getsignal(signal.SIGTERM)
    names = {}
    exec(compile(API.SETUP, "docs/api.md", "exec"), names)
    policy = SimpleNamespace(compute_dtype="float32")
    trainer = SimpleNamespace(tracker=NoopTracker(), mp=policy, add_hook=lambda hook, every=1: None)
    trainer.with_training_hooks = lambda hooks: None
    yield names | {"trainer": trainer, "state": SimpleNamespace(model=names["model"])}
    signal.signal(signal.SIGTERM, handler)  # run_main has set one


def test_every_public_name_has_one_entry():
    assert len(NAMES) == len(set(NAMES))
    assert {f"lockstep.{name}" for name in lockstep.__all__} <= set(NAMES)


def test_every_error_that_users_see_has_an_entry():
    errors = {name for name, value in vars(lockstep.errors).items() if inspect.isclass(value)}
    assert errors <= {name.rpartition(".")[2] for name in NAMES}


def told_to_users():
    """Dotted names of lockstep that pages and examples use, without modules."""
    found = {}
    for page in PAGES:
        if not page.relative_to(ROOT).as_posix().startswith("docs/adr/"):
            for code in code_names(page):
                found |= dict.fromkeys(re.findall(r"\blockstep(?:\.[a-z]+)*\.[A-Za-z_]+\b", code), page)
            for code in blocks(page, "python"):
                found |= dict.fromkeys(imported(code), page)
    for script in (ROOT / "examples").glob("*.py"):
        found |= dict.fromkeys(imported(script.read_text(encoding="utf-8")), script)
    return found


def imported(code):
    """What a program takes from lockstep, as dotted names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("lockstep."):
            yield ast.unparse(node)


def test_every_name_that_users_are_told_has_an_entry():
    public = {id(API.find(name)) for name in NAMES}
    missing = {}
    for name, where in told_to_users().items():
        try:
            found = API.find(name)
        except (ImportError, AttributeError):
            continue  # a file, or an attribute of an object
        if not inspect.ismodule(found) and id(found) not in public:
            missing[name] = where
    assert not missing


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NAMES])
def test_the_example_runs(name, setup, monkeypatch):
    monkeypatch.setattr("lockstep.callback.reporter.print_table", lambda *_, **__: None)  # when its thread comes to it
    found = API.examples(name)
    assert found, f"the docstring of {name} has no example"
    test = doctest.DocTest(found, dict(setup), name, None, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report = []
    runner.run(test, out=report.append)
    assert runner.tries == len(found) and not runner.failures, "".join(report)
