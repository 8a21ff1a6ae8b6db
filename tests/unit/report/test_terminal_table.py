"""The table of samples at a terminal and in a log, at every width."""

import dataclasses
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from lockstep.printable import visible
from lockstep.report import print_table
from tests.unit.report.made_up import row
from tests.unit.report.test_turns import TURNS


def answer(prompt_id, text, *, prompt="What is 8281 in words?", generation_id=0, finish_reason="length", **metrics):
    values = {"prompt": prompt, "generation_id": generation_id, "finish_reason": finish_reason, "metrics": metrics}
    return row(text, prompt_id=prompt_id, num_tokens=12, **values)


def printed(rows, width=80, **options):
    console = Console(file=io.StringIO(), width=width)
    print_table(rows, title="samples · step 150", console=console, **options)
    empty, *lines = console.file.getvalue().splitlines()
    assert not empty
    assert max(map(cell_len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [80, 120])
def test_every_cell_can_be_read(width):
    lines = printed([answer(0, " eight thousand two hundred eighty-one", exact_match=1.0)], width)
    assert lines[0].rstrip() == "samples · step 150"
    text = " ".join(" ".join(line.split("│")[2] for line in lines if line.startswith("│")).split())
    assert text.endswith("eight thousand two hundred eighty-one")
    for word in ("prompt", "generated text", "tokens", "finish", "exact", "match", "12", "length"):
        assert any(word in line for line in lines)
    assert lines[-1].rstrip() == "1 row · mean exact_match 1"


def test_newlines_and_control_characters_are_visible():
    assert visible(" a\nb\tc\r\x1b[31md\x00") == "a↵b⇥c␍\\x1b[31md\\x00"
    lines = printed([answer(0, "one\ntwo [red]three[/red]\x1b[2J")], 120)
    assert any("one↵two [red]three[/red]\\x1b[2J" in line for line in lines)


def test_the_turns_of_a_conversation_are_lines_of_their_own():
    row = dataclasses.replace(answer(0, "It is\n82."), turns=TURNS)
    lines = printed([row], 160)
    cells = [line.split("│")[2].strip() for line in lines if line.startswith("│")][1:]
    assert cells[-3:] == [
        'assistant: (Hm.) → calculator(expression="37 + 45")',
        "tool calculator: 82",
        "assistant: It is↵82.",
    ]


def test_what_is_left_out_is_counted():
    lines = printed([answer(0, "word " * 200, prompt="Read this. " * 50 + "What follows?")], 120)
    prompt, text = ("".join(line.split("│")[column].strip() for line in lines if "│" in line) for column in (1, 2))
    assert prompt.replace(" ", "").endswith("Whatfollows?")
    assert all("morecharacters" in cell.replace(" ", "") for cell in (prompt, text))
    rows = [answer(index, "text", exact_match=float(index < 6)) for index in range(12)]
    assert printed(rows, max_rows=8)[-1].rstrip() == "8 of 12 rows · mean exact_match 0.5"


def test_samples_of_a_prompt_are_told_apart_and_missing_metrics_marked():
    rows = [answer(0, "a", good=0.125), answer(0, "b", generation_id=1), answer(0, "c", generation_id=2, good=None)]
    lines = printed(rows, 120)
    assert any("sample" in line for line in lines)
    assert sum("–" in line for line in lines) == 2 and lines[-1].rstrip() == "3 rows · mean good 0.125 of 1"
    assert any("0.125" in line for line in lines)


def test_a_plain_log_gets_80_columns_and_no_colour(monkeypatch, capsys):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    print_table([answer(0, "word " * 30)], title="samples")
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) == 80


def test_nothing_of_a_row_reaches_the_terminal_raw():
    hostile = "a\x1b[2J\x07\x9b31m"
    row_ = dataclasses.replace(answer(0, hostile, prompt=hostile, **{hostile: 1.0}), finish_reason=hostile)
    console = Console(file=io.StringIO(), width=120)
    print_table([row_], title=hostile, console=console)
    assert "2J" in console.file.getvalue() and not set(console.file.getvalue()) & set("\x1b\x07\x9b")


METRICS = {"exact_match": 1.0, "gsm8k": 0.0, "length": 12.0, "repetition": 0.125, "perplexity": 1234.0, "judge": None}
VALUES = dict(zip(METRICS, ("1", "0", "12", "0.125", "1.23e+03", "–"), strict=True))
SAID = "eight thousand two hundred eighty-one, 八千二百八十一, is the number that I would write here"


@pytest.mark.parametrize("count", range(len(METRICS) + 1))
@pytest.mark.parametrize("width", [72, 73, 80, 100, 120, 200])
def test_in_a_table_texts_have_20_columns_at_least_and_every_number_is_there(width, count):
    metrics = dict(list(METRICS.items())[:count])
    lines = printed([answer(0, SAID, **metrics), answer(0, SAID, generation_id=1, **metrics)], width)
    top = next(line for line in lines if line.startswith("╭"))
    prompt, text = (len(part) - 2 for part in top.strip("╭╮").split("┬")[:2])
    assert prompt >= 20 and text >= 20, "two spaces of the frame are not counted"
    table = [line for line in lines if line.startswith("│")]
    cell = " ".join(" ".join(line.split("│")[2] for line in table).split())
    words = lambda text: re.sub(r"\s", "", text)  # noqa: E731 - a long word is folded
    assert words(cell).count(words(SAID)) == 2
    heading = words("".join(lines[2 : lines.index(next(line for line in lines if line.startswith("├")))]))
    for name in metrics:
        in_heading = all(part in heading for part in name.split("_"))
        value = VALUES[name]
        assert in_heading != (words(cell).count(name + value) == 2), (name, lines)


@pytest.mark.parametrize("width", [71, 40, 22, 21, 20])
def test_below_72_columns_the_parts_of_a_row_stand_below_each_other(width):
    rows = [answer(0, SAID, **METRICS), answer(7, "short", generation_id=1, finish_reason="stop", **METRICS)]
    lines = printed(rows, width)
    assert not set("│╭") & set("".join(lines))
    flat = re.sub(r"\s", "", "".join(lines))
    assert re.sub(r"\s", "", SAID) in flat and flat.count("prompt0:") == flat.count("prompt7:") == 1
    numbers = "exact_match1·gsm8k0·length12·repetition0.125·perplexity1.23e+03·judge–"
    assert flat.count(f"tokens12·finishlength·{numbers}") == 1 and flat.count(f"tokens12·finishstop·{numbers}") == 1
    begin = lines.index(next(line for line in lines if line.startswith("generated text"))) + 1
    assert cell_len(lines[begin].rstrip()) > min(width, 40) / 2, "a text has the whole width"
