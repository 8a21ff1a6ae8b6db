import dataclasses
import io

import pytest
from rich.console import Console

from lockstep.printable import visible
from lockstep.report import Row, print_table


def row(prompt_id, text, *, prompt="What is 8281 in words?", generation_id=0, **metrics):
    return Row(
        step=150,
        prompt_id=prompt_id,
        generation_id=generation_id,
        prompt=prompt,
        generated_text=text,
        num_tokens=12,
        finish_reason="length",
        mean_logprob=-0.5,
        metrics=metrics,
    )


def printed(rows, width=80, **options):
    console = Console(file=io.StringIO(), width=width)
    print_table(rows, title="samples · step 150", console=console, **options)
    empty, *lines = console.file.getvalue().splitlines()
    assert not empty
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [80, 120])
def test_every_cell_can_be_read(width):
    lines = printed([row(0, " eight thousand two hundred eighty-one", exact_match=1.0)], width)
    assert lines[0].rstrip() == "samples · step 150"
    text = " ".join(" ".join(line.split("│")[2] for line in lines if line.startswith("│")).split())
    assert text.endswith("eight thousand two hundred eighty-one")
    for word in ("prompt", "generated text", "tokens", "finish", "exact", "match", "12", "length"):
        assert any(word in line for line in lines)
    assert lines[-1].rstrip() == "1 row · mean exact_match 1"


def test_newlines_and_control_characters_are_visible():
    assert visible(" a\nb\tc\r\x1b[31md\x00") == "a↵b⇥c␍\\x1b[31md\\x00"
    lines = printed([row(0, "one\ntwo [red]three[/red]\x1b[2J")], 120)
    assert any("one↵two [red]three[/red]\\x1b[2J" in line for line in lines)


def test_what_is_left_out_is_counted():
    lines = printed([row(0, "word " * 200, prompt="Read this. " * 50 + "What follows?")], 120)
    prompt, text = ("".join(line.split("│")[column].strip() for line in lines if "│" in line) for column in (1, 2))
    assert prompt.replace(" ", "").endswith("Whatfollows?")
    assert all("morecharacters" in cell.replace(" ", "") for cell in (prompt, text))
    rows = [row(index, "text", exact_match=float(index < 6)) for index in range(12)]
    assert printed(rows, max_rows=8)[-1].rstrip() == "8 of 12 rows · mean exact_match 0.5"


def test_samples_of_a_prompt_are_told_apart_and_missing_metrics_marked():
    rows = [row(0, "a", good=0.125), row(0, "b", generation_id=1), row(0, "c", generation_id=2, good=None)]
    lines = printed(rows, 120)
    assert any("sample" in line for line in lines)
    assert sum("–" in line for line in lines) == 2 and lines[-1].rstrip() == "3 rows · mean good 0.125 of 1"
    assert any("0.125" in line for line in lines)


def test_a_plain_log_gets_80_columns_and_no_colour(monkeypatch, capsys):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    print_table([row(0, "word " * 30)], title="samples")
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) == 80


def test_nothing_of_a_row_reaches_the_terminal_raw():
    hostile = "a\x1b[2J\x07\x9b31m"
    row_ = dataclasses.replace(row(0, hostile, prompt=hostile, **{hostile: 1.0}), finish_reason=hostile)
    console = Console(file=io.StringIO(), width=120)
    print_table([row_], title=hostile, console=console)
    assert "2J" in console.file.getvalue() and not set(console.file.getvalue()) & set("\x1b\x07\x9b")
