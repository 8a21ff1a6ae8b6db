"""The examples of docs/engine.md, run as they stand there, one after the other."""

import re
from pathlib import Path

import jax

from lockstep.placement import make_mesh
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_examples_run_and_agree(capsys):
    generate, stream = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    mesh, tokenizer = make_mesh("1,1,1", jax.devices()[:1]), tiny.tokenizer()
    model = tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size())
    names = {"model": model, "mesh": mesh, "tokenizer": tokenizer}
    exec(compile(generate, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert {len(each.tokens) for each in names["completions"]} and names["engine"].sizing.describe()
    compiled = len(names["engine"].compilations)
    exec(compile(stream, str(PAGE), "exec"), names)
    assert len(names["engine"].compilations) == compiled, "the second call compiles nothing"
    streamed = sorted(tuple(map(int, line.split())) for line in capsys.readouterr().out.splitlines())
    assert streamed == [(each.prompt_id, each.generation_id, len(each.tokens)) for each in names["completions"]]
