"""Every fenced block of the documentation is run, or read by what it is written for; tests/snippets.py says which."""

import copy
import importlib
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from lockstep.errors import ConfigError
from lockstep.launch import main as launch
from lockstep.launch import parse as parse_launch
from lockstep.launch.google import TpuVmBackend
from lockstep.main import cli, prepare, runs
from lockstep.main.arguments import decode_config, name_words, parse_arguments, read_values
from lockstep.main.commands import COMMANDS, Arguments, configured_commands, find_command
from lockstep.main.plan import topology
from lockstep.report import Row, append_jsonl
from tests import snippets
from tests.snippets import BLOCKS, ROOT, commands

LATER = ("status", "logs", "stop", "delete")


def of(*languages):
    return [block for block in BLOCKS if block.language in languages]


def named(blocks):
    return pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in blocks])


def test_every_block_is_of_a_kind_and_has_a_row():
    assert {block.language for block in BLOCKS} <= set(snippets.KINDS)
    (block,) = snippets.read_blocks("page.md", "text\n\n- item\n\n  ```\n  code\n  ```\n")
    assert (block.language, block.text, block.line) == ("", "code\n", 5)
    assert {block.page for block in of("python")} == set(snippets.PROGRAMS)
    assert {block.name for block in of("yaml", "json")} == set(snippets.CONFIGURATIONS)
    lines = [line for block in of("sh") for line in commands(block)]
    assert not [start for start in snippets.NOT_PARSED if not any(line.startswith(start) for line in lines)]
    assert {block.name for block in of("text")} == {*snippets.SHOWN, *snippets.NOT_PRINTED}
    for name, (file, _) in snippets.SHOWN.items():  # by a test that names it
        assert f'"{name}"' in (ROOT / file).read_text(encoding="utf-8")


# Programs


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in snippets.SLOW)) for page in snippets.PROGRAMS]
)
def test_programs_run(page, tmp_path, monkeypatch):
    names = {}
    exec(compile(snippets.PROGRAMS[page], f"set-up of {page}", "exec"), names)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    for block in of("python"):
        if block.page == page:
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
    exec(snippets.AFTER.get(page, ""), names)


# Configurations


def merged(below, above):
    """A mapping with another one laid over it, at every depth."""
    found = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def configurations():
    for block in of("yaml", "json"):
        slow = snippets.CONFIGURATIONS.get(block.name) == "lm_eval"  # whose import takes 5 s
        yield pytest.param(block, id=block.name, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("block", configurations())
def test_configurations_are_read(block, tmp_path):
    reader = snippets.CONFIGURATIONS[block.name]
    values = (json.loads if block.language == "json" else yaml.safe_load)(block.text)
    if reader == "calibration":
        from lockstep.placement.device import calibrated
        from lockstep.placement.device.chips import chip_named

        (tmp_path / "chip.json").write_text(block.text)
        chip = calibrated(chip_named(values["chip"], "tpu"), str(tmp_path / "chip.json"))
        assert (chip.bandwidth, chip.flops) == (values["bandwidth"], values["flops"])
    elif reader == "lm_eval":
        from lm_eval.api.task import TaskConfig

        assert TaskConfig(**values).task == values["task"]
    else:
        cls = configured_commands()[reader].config()
        required = dict(snippets.REQUIRED[reader])
        if "initialize_from_hf" in values:
            required.pop("model", None)
        decode_config(cls, merged(required, values), block.name)


# Command lines


def is_parsed(line):
    return not line.startswith(tuple(snippets.NOT_PARSED))


def read_line(line):
    """Read a command line as its program would.

    Raises:
        ConfigError, SystemExit, AssertionError: The program would refuse it.
    """
    words = [snippets.STANDS_FOR.get(word, word) for word in shlex.split(line)]
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if ">" in words:
        words = words[: words.index(">")]
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "lockstep":
        read_lockstep(rest[0], rest[1:])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), f"no such target: {rest}"
    elif program == "pip":
        read_pip(rest)
    elif program in ("python", "python3.12"):
        read_python(rest)
    else:
        raise AssertionError(f"nothing reads {program!r}: add it to read_line or to NOT_PARSED")


def read_python(words):
    if words[0] == "infra/launch.py":
        read_lockstep("launch", words[1:])
    elif words[:2] == ["-m", "pip"]:
        read_pip(words[2:])
    elif words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[2]).exists()
    elif words[0] != "loop.py":  # what the quickstart has the reader save
        path = importlib.util.find_spec(words[1]).origin if words[0] == "-m" else ROOT / words[0]
        source = Path(path).read_text(encoding="utf-8")
        assert not [w for w in words if w.startswith("--") and w != "--config_path" and f'"{w}"' not in source]


def read_pip(words):
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (package,) = [word for word in words[1:] if re.fullmatch(r"(jax-lockstep|\.)(\[[\w,]+\])?", word)]
    assert set(re.findall(r"\w+", package.partition("[")[2])) <= set(project["optional-dependencies"])


def read_lockstep(name, words):
    if name == "launch":
        if words[:1] and words[0] in LATER:
            assert len([word for word in words[1:] if not word.startswith("-")]) == 1
            return
        options = parse_launch(words)
        if options.command and options.command[0] in ("lockstep", "python"):
            read_line(shlex.join(options.command))
    elif "--help" in words or name == "--help":
        assert name == "--help" or name in {command.name for command in COMMANDS}
    elif name in ("check", "demo", "report", "tail"):
        parser = Arguments(name, find_command(name).add_options)
        parser.parse_args(words[: words.index("--")] if "--" in words else words)
    elif name == "plan":
        own, rest = prepare.split_plan(words)
        assert topology(own["topology"])
        prepare.read_plan(own.get("command"), with_file(rest))
    elif name == "doctor":
        own, rest = prepare.split_doctor(words)
        parse_arguments(configured_commands()[name].config(), own)
        read_values(with_file(rest))
    else:
        cls = configured_commands()[name].config()
        if name == "eval":
            words = runs.name_tasks(words)
        elif name in ("export", "convert"):
            words = name_words(words, ["checkpoint", "output"] if name == "export" else ["run"], "")
        parse_arguments(cls, with_file(words))


def with_file(words):
    """A command line whose configuration is there: what the page of the first pod writes is one of the shipped ones."""
    shipped = "config/simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml"
    return [re.sub(r"my-runs/simpo.yaml", shipped, word) for word in words]


@named(of("sh"))
def test_command_lines_are_read(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in filter(is_parsed, commands(block)):
        read_line(line)


def heads():
    """The command lines in the comments at the beginnings of the shipped configurations."""
    for path in sorted((ROOT / "config").rglob("*.yaml")):
        head = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))[0]
        text = "\n".join(line.removeprefix("#").strip() for line in head.splitlines()).replace("\\\n", " ")
        lines = re.findall(r"^.*(infra/launch\.py .*)$", text, re.MULTILINE)
        yield pytest.param(path, [line.partition(", also")[0] for line in lines], id=path.name)


@pytest.mark.parametrize(("path", "lines"), heads())
def test_the_head_of_a_configuration_says_how_it_is_launched(path, lines, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert lines
    for words in map(shlex.split, lines):
        options = parse_launch(words[1:])
        assert ROOT / options.command[options.command.index("--config_path") + 1] == path
        read_line(shlex.join(["python", *words]))
        if options.backend != "local":  # what the run reads on a worker is copied there
            TpuVmBackend().dry_run(options)
            needed = [path.relative_to(ROOT), *re.findall(r"^\w+: (data/\S+)", path.read_text(), re.MULTILINE)]
            assert all(any(Path(name).is_relative_to(each) for each in options.sync) for name in needed)


@pytest.mark.parametrize(
    "line",
    [
        "lockstep train-lm --trainer.nmu_train_steps 3",
        "lockstep launch --tpu_nme my-pod -- lockstep train-lm",
        "lockstep launch --processes 2 -- lockstep train-lm --no_such.key 1",
        "lockstep report one --wach",
        "lockstep plan --config_path config/demo.yaml --topology v9-64",
        "make dmeo",
        "pip install 'jax-lockstep[tpuu]'",
        "frobnicate",
    ],
)
def test_a_wrong_command_line_is_seen(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ConfigError, SystemExit, AssertionError)):
        read_line(line)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with two runs and what pages have the reader make, as home and working directory."""
    for name in ("data", "examples", "infra"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "config", tmp_path / "config")  # `--sync` copies no directory that is a link
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    Path("my-runs").mkdir()
    Path("my-runs/simpo.yaml").write_text("{}\n")
    Path("lockstep.env").write_text("A_KEY=0123456789abcdef\n")
    asked = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": "2 + 2 =", "num_tokens": 1}
    for name in ("my-run", "other-run"):
        row = Row(**asked, generated_text=name, finish_reason="stop", mean_logprob=-0.5)
        Path("runs", name).mkdir(parents=True)
        append_jsonl(Path("runs", name, "samples.jsonl"), [row.to_record()])
    return tmp_path


@named([block for block in of("sh") if block.page == "docs/report.md"])
def test_readers_of_runs_run(block, desk, capsys):
    for line in commands(block):
        words = [snippets.STANDS_FOR.get(word, word) for word in shlex.split(line)[1:]]
        if "--watch" in words:
            continue
        assert cli.run([*words, "--no-follow"] if words[0] == "tail" else words) == 0, capsys.readouterr().out
    assert Path("runs/my-run/report.html").stat().st_size > 10_000
    assert "my-run" in capsys.readouterr().out


def launches():
    """The words after the launcher's name of each line that starts a job."""
    for block in of("sh"):
        for line in filter(is_parsed, commands(block)):
            found = re.match(r"(?:\S*python\S* infra/launch\.py|lockstep launch) (.* -- .*)", line)
            if found and block.page != "docs/first-pod.md":
                words = shlex.split(found[1])
                yield pytest.param(words, id=f"{block.page}:{words[0]}{block.line}")


@pytest.mark.parametrize("words", launches())
def test_launches_are_shown(words, desk, capsys):
    at = words.index("--")
    words = [snippets.STANDS_FOR.get(word, word.replace("~", str(desk))) for word in words]
    assert launch([*words[:at], "--dry-run", *words[at:]]) == 0
    out = capsys.readouterr().out
    assert words[-1].strip("'") in out


# Outputs


@pytest.mark.parametrize(
    ("name", "line", "other", "same"),
    [
        ("docs/doctor.md:text:0", "takes 4.41 ms", "takes 13 ms", True),
        ("docs/doctor.md:text:0", "fsdp 4", "fsdp 8", False),
        ("docs/doctor.md:text:0", "ok       coordination", "warning  coordination", True),
        ("docs/grpo.md:text:0", "0.672 (last 10: 0.540)  rollout", "0.672 (last 10: 0.540)  roll", False),
        ("docs/grpo.md:text:0", "step 40/150  1.23 steps/s  reward 0.672", "step 7/150  – steps/s  reward 0.001", True),
        ("docs/plan.md:text:0", "1.55 ms", "1.56 ms", False),
        ("docs/plan.md:text:0", "total     ", "total ", True),
    ],
)
def test_what_varies_may_differ_and_nothing_else(name, line, other, same):
    text = "printed before\n" + snippets.named(name).text
    assert line in text
    assert (snippets.lacking(name, text.replace(line, other)) is None) == same


def test_the_order_of_lines_does_not_vary():
    lines = snippets.named("docs/plan.md:text:0").text.splitlines()
    assert snippets.lacking("docs/plan.md:text:0", "\n".join(reversed(lines)))


def test_the_dry_run_of_the_page_about_google_is_printed(desk, capsys):
    name = "docs/launch-google.md:text:0"
    words = shlex.split(commands(snippets.named("docs/launch-google.md:sh:0"))[0])[2:]
    at = words.index("--")
    assert launch([*words[:at], "--dry-run", *words[at:]]) == 0
    assert snippets.lacking(name, capsys.readouterr().out) is None
