import json
import math
import os

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import conversation_text
from lockstep.report.saved_rows import find_run, parse_row, read_rows, require_rows
from tests.unit.report.test_turns import TURNS

RECORD = {"step": 3, "prompt_id": 1, "prompt": "What?", "generated_text": "That."}


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl is a pipe or a device, and is read more than once\. Write"):
        find_run(tmp_path / "rows.jsonl")


def test_columns_are_told_apart_by_what_they_have():
    row = parse_row(
        {**RECORD, "verdict": "good", "loss": "NaN", "up": "Infinity", "ok": True, "none": None, "big": 10**400}, "f:1"
    )
    assert row.texts == {"verdict": "good"}
    assert math.isnan(row.numbers["loss"])
    assert {name: row.numbers[name] for name in ("up", "ok", "none", "big")} == {
        "up": math.inf,
        "ok": 1,
        "none": None,
        "big": math.inf,
    }
    assert (row.finish_reason, row.generation_id, row.tokens) == ("", 0, [])


def test_a_conversation_is_read_with_its_turns_and_shown_as_lines():
    row = parse_row({**RECORD, "generated_text": "It is\n82.", "turns": TURNS}, "f:1")
    assert row.turns == tuple(TURNS) and "turns" not in {**row.numbers, **row.texts}
    assert row.shown == conversation_text(TURNS) == conversation_text(row.to_row().turns)
    assert parse_row({**RECORD, "turns": []}, "f:1").shown == RECORD["generated_text"]
    for wrong in ("no", [3], [{"role": "user"}], [{"content": "a"}], [{**TURNS[1], "reward": "much"}]):
        with pytest.raises(LockstepError, match="f:1: the column 'turns' is .* a list of messages"):
            parse_row({**RECORD, "turns": wrong}, "f:1")


def test_rounds_and_named_prompts_and_tokens_are_read():
    record = {
        "round": 1,
        "prompt_id": "gsm8k/7",
        "prompt": "",
        "generated_text": "a b",
        "tokens": ["a", " b"],
        "token_logprobs": [-1, "-Infinity"],
    }
    row = parse_row(record, "f:1")
    assert (row.axis, row.when, row.prompt_id) == ("round", 1, "gsm8k/7")
    assert row.tokens == [("a", -1.0), (" b", -math.inf)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"step": None},
            "the column 'step' is None; a whole number from 0 to 2**53 was expected. Mend or remove the line.",
        ),
        ({"step": True}, "the column 'step' is True"),
        ({"step": -1}, "the column 'step' is -1"),
        ({"step": 1.5}, "the column 'step' is 1.5"),
        ({"prompt": 7}, "the column 'prompt' is 7; a text was expected"),
        ({"prompt_id": [1]}, "the column 'prompt_id' is [1]"),
        ({"generation_id": "0"}, "the column 'generation_id' is '0'"),
        ({"finish_reason": 0}, "the column 'finish_reason' is 0"),
        ({"deep": {"a": 1}}, "the column 'deep' is {'a': 1}; a number, a text or null was expected"),
        ({"tokens": ["a"]}, "the column 'token_logprobs' is missing"),
        ({"tokens": "a", "token_logprobs": [1]}, "the column 'tokens' is 'a'; a list of texts"),
        ({"tokens": ["a"], "token_logprobs": [None]}, "the column 'token_logprobs' is [None]; a list of numbers"),
        ({"tokens": ["a"], "token_logprobs": [0, 0]}, "1 tokens and 2 token_logprobs. Write one of each per token."),
    ],
)
def test_what_is_not_a_row_is_said_with_its_line(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(RECORD)}\n\n{json.dumps(RECORD | change)}\n")
    with pytest.raises(LockstepError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:3: {message}")


def test_a_file_of_metrics_is_not_one_of_rows():
    with pytest.raises(
        LockstepError, match=r"m:1: the column 'prompt_id' is missing; found step, train/loss\. A row has"
    ):
        parse_row({"step": 1, "train/loss": 2.0}, "m:1")


def test_half_of_a_last_line_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(RECORD) + '\n{"step": 4, "pro')
    assert [row.when for row in read_rows(path)] == [3]


def make(directory, *names):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return directory


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("samples.jsonl", "rollouts.jsonl", "metrics.jsonl"), ["samples.jsonl", "rollouts.jsonl"]),
        (("samples/samples.jsonl", "samples/samples-host-000.jsonl"), ["samples.jsonl"]),
        (
            ("samples/samples-host-001.jsonl", "samples/samples-host-000.jsonl"),
            [f"samples-host-00{n}.jsonl" for n in (0, 1)],
        ),
        (("rollouts.jsonl",), ["rollouts.jsonl"]),
        ((), []),
    ],
)
def test_a_directory_has_one_kind_of_samples_and_its_rollouts(tmp_path, names, rows):
    run = find_run(make(tmp_path / "run", *names) if names else tmp_path)
    assert [path.name for path in (*run.rows, *run.rollouts)] == rows
    assert all((path.name == "rollouts.jsonl") == (path in run.rollouts) for path in (*run.rows, *run.rollouts))
    assert run.name == ("run" if names else tmp_path.name)


def test_a_file_has_the_metrics_beside_it(tmp_path):
    directory = make(tmp_path / "run", "rollouts.jsonl", "mine.jsonl", "metrics.jsonl", "metrics-1.jsonl")
    for file, name in (("rollouts.jsonl", "run"), ("mine.jsonl", "run/mine")):
        run = find_run(directory / file)
        assert (run.name, (*run.rows, *run.rollouts)) == (name, (directory / file,))
        assert [path.name for path in run.metrics] == ["metrics-1.jsonl", "metrics.jsonl"]


def test_a_file_that_is_not_all_of_its_run_has_a_name_of_its_own(tmp_path):
    directory = make(tmp_path / "run", "samples.jsonl")
    assert find_run(directory / "samples.jsonl").name == "run"
    make(directory, "rollouts.jsonl")
    assert [find_run(directory / f"{kind}.jsonl").name for kind in ("samples", "rollouts")] == [
        "run/samples",
        "run/rollouts",
    ]


def test_what_is_not_there_is_said_with_what_is_near(tmp_path):
    make(tmp_path / "old", "samples.jsonl")
    make(tmp_path / "new", "metrics.jsonl")
    os.utime(tmp_path / "old", (1, 1))
    with pytest.raises(ConfigError, match=r"nwe does not exist\. Name the directory of a run .* Did you mean .*/new\?"):
        find_run(tmp_path / "nwe")
    with pytest.raises(ConfigError, match=r"has no samples\.jsonl and no rollouts\.jsonl\. .* Did you mean .*/new\?"):
        require_rows(find_run(tmp_path))
    with pytest.raises(ConfigError, match=r"gs://bucket/run is a URL; only local files are read"):
        find_run("gs://bucket/run")


def test_the_stamp_changes_with_what_is_written_or_replaced(tmp_path):
    make(tmp_path, "samples.jsonl", "metrics.jsonl")
    stamps = {find_run(tmp_path).stamp()}
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    stamps.add(find_run(tmp_path).stamp())
    (tmp_path / "draft").write_text("")
    os.replace(tmp_path / "draft", tmp_path / "samples.jsonl")
    run = find_run(tmp_path)
    stamps.add(run.stamp())
    assert len(stamps) == 3 and run.stamp() in stamps
    (tmp_path / "samples.jsonl").unlink()
    assert len(run.stamp()) == 1
