"""Every fenced block of the documentation is run, or read by what it is written for; tests/snippets.py says which."""

import contextlib
import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lockstep.configuration import decode_config
from lockstep.launch import parse
from lockstep.launch.setup_vm import Version
from lockstep.main import cli
from lockstep.main.commands import configured_commands
from lockstep.report import Row, append_jsonl
from lockstep.training.data import GrpoDataConfig
from lockstep.training.data.examples import FORMATS
from lockstep.training.data.records import BadRow
from lockstep.training.rl.questions import iter_questions
from tests import snippets, tiny
from tests.git import HAS_GIT
from tests.snippets import BLOCKS, ROOT, commands


def of(*languages):
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_is_of_a_kind_and_every_row_has_a_block():
    assert {block.language for block in BLOCKS} <= set(snippets.KINDS)
    assert {block.page for block in of("python")} == set(snippets.PROGRAMS)
    assert {block.name for block in of("yaml", "json")} >= set(snippets.CONFIGURATIONS)
    assert {block.name for block in of("text")} == {*snippets.SHOWN, *snippets.NOT_PRINTED}
    for name, (file, _) in snippets.SHOWN.items():  # by a test that names it
        assert f'"{name}"' in (ROOT / file).read_text(encoding="utf-8")


def each(argument, values, slow=()):
    marked = [pytest.param(value, id=str(value), marks=[pytest.mark.slow] * (value in slow)) for value in values]
    return pytest.mark.parametrize(argument, marked)


@each("page", snippets.PROGRAMS, snippets.SLOW)
def test_programs_run(page, tmp_path, monkeypatch):
    names = {}
    exec(compile(snippets.PROGRAMS[page], f"set-up of {page}", "exec"), names)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    for block in of("python"):
        if block.page == page:
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
    exec(snippets.AFTER.get(page, ""), names)


def check_record(record, directory):
    """A record that is read as that of its format: its fields are those, and it can be trained on."""
    formats = [kind for kind in FORMATS.values() if set(kind.fields) == set(record)]
    for kind in formats:
        (example,) = kind.tokenize(tiny.tokenizer(), [record])
        assert not isinstance(example, BadRow), example
    if not formats:
        (directory / "questions.jsonl").write_text(json.dumps(record), encoding="utf-8")
        ((_, prompt),) = iter_questions(GrpoDataConfig(train_urls=[str(directory / "questions.jsonl")]))
        assert prompt.answer == record["answer"]


@each("name", [block.name for block in of("yaml", "json")], ["docs/evaluation.md:yaml:1"])  # lm_eval's import takes 5 s
def test_configurations_are_read(name, tmp_path):
    block, reader = snippets.named(name), snippets.CONFIGURATIONS.get(name, "train-lm")
    if reader == "records":
        for line in block.text.splitlines():
            check_record(json.loads(line), tmp_path)
        return
    values = yaml.safe_load(block.text)
    if reader == "lm_eval":
        assert importlib.import_module("lm_eval.api.task").TaskConfig(**values).task == values["task"]
    else:
        without = {"model"} if "initialize_from_hf" in values else set()
        for key in snippets.REQUIRED[reader].keys() - without:
            given = snippets.REQUIRED[reader][key]
            values[key] = given | values.get(key, {}) if isinstance(given, dict) else values.get(key, given)
        decode_config(configured_commands()[reader].config(), values, name)


class Begun(Exception):
    """A command line has been read, and what it names would begin."""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with two runs and what pages have the reader make, where no command begins its work."""

    def begin(*_, **__):
        raise Begun

    for name in snippets.BEGINS:
        monkeypatch.setattr(f"lockstep.{name}", begin)
    monkeypatch.setattr(sys.modules["lockstep.launch.main"], "load_record", begin)
    if not HAS_GIT:
        for module in ("gke", "setup_vm"):
            monkeypatch.setattr(f"lockstep.launch.{module}.version_of", lambda: Version(name="1", changed=False))
    (tmp_path / "any.whl").touch()  # tests/package builds the wheel, which takes seconds
    monkeypatch.setattr("lockstep.launch.gke.build_wheel", lambda *_: tmp_path / "any.whl")
    monkeypatch.setattr("lockstep.main.prepare.jax", SimpleNamespace(config=SimpleNamespace(update=lambda *_: None)))
    for name in ("data", "examples", "infra"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "config", tmp_path / "config")  # `--sync` copies no directory that is a link
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    Path("my-runs").mkdir()
    shutil.copy("config/simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "my-runs/simpo.yaml")
    Path("lockstep.env").write_text("A_KEY=0123456789abcdef\n", encoding="utf-8")
    asked = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": "2 + 2 =", "num_tokens": 1}
    row = Row(**asked, generated_text="4", finish_reason="stop", mean_logprob=-0.5).to_record()
    for name in ("my-run", "other-run"):
        Path("runs", name).mkdir(parents=True)
        append_jsonl(Path("runs", name, "samples.jsonl"), [row])


def run(line):
    """Run a command line up to where its command would begin; a launch is a dry run, and what it starts is run too."""
    line = re.sub(r"(?<= )~", str(Path.cwd()), re.sub(r"^\S*python\S* infra/launch\.py", "lockstep launch", line))
    words = [snippets.STANDS_FOR.get(word, word) for word in shlex.split(line.partition(" > ")[0])]
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    program, words = Path(words[0]).name, words[1:]
    if program == "lockstep":
        if words[0] == "launch" and "--" in words:
            at = words.index("--")
            run(shlex.join(words[at + 1 :]))
            words.insert(at, "--dry-run")
        ends = {"tail": ["--no-follow"], "data": ["--rows", "50"]}  # 8 s for all rows
        with contextlib.suppress(Begun):
            assert cli.run([*words, *ends.get(words[0], [])]) == 0
    elif program == "make":
        assert set(words) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), words
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        (named,) = filter(None, (re.fullmatch(r"(?:jax-lockstep|\.)(?:\[([\w,]+)\])?", word) for word in words))
        assert set((named[1] or "tpu").split(",")) <= set(extras)
    elif words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[2]).exists()
    elif program.startswith("python"):
        file = importlib.util.find_spec(words[1]).origin if words[0] == "-m" else ROOT / words[0]
        source = "" if words[0] == "loop.py" else Path(file).read_text(encoding="utf-8")  # the reader writes loop.py
        assert not [w for w in words if w.startswith("--") and w != "--config_path" and f'"{w}"' not in source]
    else:
        raise AssertionError(f"nothing reads {program!r}: add it to run() or to NOT_READ")


@each("name", [block.name for block in of("sh")])
def test_command_lines_run(name, desk, capsys):
    for line in commands(snippets.named(name)):
        if not line.startswith(tuple(snippets.NOT_READ)):
            run(line)
    if name == "docs/launch.md:sh:2":
        assert snippets.lacking("docs/launch.md:text:0", capsys.readouterr().out) is None


@each("path", sorted(path.relative_to(ROOT) for path in (ROOT / "config").rglob("*.yaml")))
def test_the_head_of_a_configuration_says_how_it_is_launched(path, desk):
    text = path.read_text(encoding="utf-8")
    head = re.sub(r"^# *", "", re.match(r"(?:#.*\n)*", text)[0], flags=re.MULTILINE).replace("\\\n", " ")
    lines = re.findall(r"infra/launch\.py (.*?)(?:, also.*)?$", head, re.MULTILINE)
    assert lines
    for line in lines:
        run(f"lockstep launch {line}")
        options = parse(shlex.split(line))
        assert Path(options.command[options.command.index("--config_path") + 1]) == path
        if options.backend != "local":  # what the run reads on a worker is copied there
            needed = [path, *re.findall(r"^\w+: (data/\S+)", text, re.MULTILINE)]
            assert all(any(Path(name).is_relative_to(each) for each in options.sync) for name in needed)
