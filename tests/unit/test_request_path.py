"""The path of a request from callback to table: few files, those that docs/architecture.md draws, traced in a round."""

import itertools
import re
import threading
from collections import deque
from pathlib import Path

import jax

import lockstep
from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.round import RoundPrompts, RoundResult
from lockstep.engine import Generation
from lockstep.engine.schedule import Batch, DecodeResults
from lockstep.engine.schedule.sequence import Sequence
from lockstep.health import AnsweredPrompt
from lockstep.placement import make_mesh
from lockstep.report import Row, print_table
from lockstep.text import Prompt
from lockstep.types import Completion, Request
from tests import tiny

PACKAGE = Path(lockstep.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWN = re.findall(
    r"^((?:[a-z]+/)*){?([\w,]+)}?\.py", re.search(r"```text\n(callback.*?)```", PAGE, re.DOTALL)[1], re.MULTILINE
)

STAGES = (
    *(Prompt, RoundPrompts, Request, Sequence, Batch, DecodeResults),
    *(Completion, Generation, RoundResult, AnsweredPrompt, Row),
)
"""A request, what it was before, and what it becomes."""
READERS = {"config_fields.py", "json_text.py"}
"""What any dataclass is checked with and read by."""
VARIADIC = 4 | 8  # inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


def is_stage(value, depth=2):
    """Whether a value is a stage of a request, or a collection that begins with one or nearly so."""
    if depth and isinstance(value, list | tuple | deque | dict):
        values = value.values() if isinstance(value, dict) else value
        return any(is_stage(element, depth - 1) for element in itertools.islice(values, 4))
    return isinstance(value, STAGES)


def path_of(work, last):
    """The files of the package whose functions are passed a stage, pass or return one, until ``last`` has returned."""
    files, returned = set(), []

    def note(frame, event, value):
        code = frame.f_code
        if returned or event not in ("call", "return"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + (code.co_flags & VARIADIC).bit_count()]
        if any(map(is_stage, [value] if event == "return" else [frame.f_locals.get(name) for name in names])):
            files.update(user.f_code.co_filename for user in (frame, frame.f_back) if user is not None)
        if event == "return" and code is last.__code__:
            returned.append(code)

    threading.setprofile_all_threads(note)
    try:
        work()
    finally:
        threading.setprofile_all_threads(None)
    assert returned
    return {Path(file).relative_to(PACKAGE).as_posix() for file in files if file.startswith(f"{PACKAGE}/")}


def test_it_is_drawn_and_at_most_20_files_long():
    config = InferenceEvalConfig(prompts=["one", "two"], max_new_tokens=8, eval_every=1, on_error="raise")
    weights = tiny.placed_weights(make_mesh("1,1,1", jax.devices()[:1]), vocab=tiny.vocab_size())
    callback = SampleCallback(config, tiny.tokenizer())

    def sample():
        callback(tiny.Info(callback.rounds + 1, (tiny.CONFIG, weights)))
        assert callback.flush() and not callback.report_errors

    sample()  # compiles
    files = path_of(sample, print_table) - READERS
    assert files == {f"{room}{name}.py" for room, names in DRAWN for name in names.split(",")}
    assert len(files) <= 20
