"""What TensorBoard finds in the files, read as TensorBoard reads them."""

import dataclasses
import random
import string
import struct
from html.parser import HTMLParser

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from lockstep.errors import ConfigError
from lockstep.hosts import leader_only
from lockstep.printable import printable
from lockstep.report import BackgroundTracker, JsonlTrackerConfig, build_tracker, read_jsonl, rewind_tracker
from lockstep.report.trackers import TensorboardTrackerConfig
from lockstep.report.trackers.tensorboard import escape_markdown, markdown_table
from tests.unit.report.trackers.fakes import row


def events(directory):
    """All events of the files, each record checked against its checksums (the TFRecord format)."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            header, record = data[at : at + 8], data[at + 12 : at + 12 + length]
            checks = struct.unpack_from("<I", data, at + 8) + struct.unpack_from("<I", data, at + 12 + length)
            assert checks == (masked_crc32c(header), masked_crc32c(record))
            found.append(Event.FromString(record))
            at += 16 + length
    return found


def values(directory):
    """(step, tag, plugin, value) of every summary."""
    found = []
    for event in events(directory):
        for each in event.summary.value:
            plugin = each.metadata.plugin_data.plugin_name
            value = each.tensor.string_val[0].decode() if plugin == "text" else each.simple_value
            found.append((event.step, each.tag, plugin, value))
    return found


def test_scalars_and_samples_are_in_the_files(tmp_path):
    rows = [row(2, "a | b\n<b>`c`", good=0.25), row(2, "d", good=None)]
    with jax.no_execution(True):
        tracker = build_tracker((TensorboardTrackerConfig(), JsonlTrackerConfig()), tmp_path, "name")
        tracker.log({"train/loss": 1.5}, step=1)
        tracker.log({"train/loss": 0.5, "inference_eval/mode": "global_mesh"}, step=2)
        tracker.log_rows("inference_eval/samples", rows, step=2)
        tracker.log_rows("inference_eval/samples", [], step=3)
        tracker.finish()
        tracker.finish()
    found = values(tmp_path / "tensorboard")
    assert found[:3] == [
        (1, "train/loss", "", 1.5),
        (2, "train/loss", "", 0.5),
        (2, "inference_eval/mode/text_summary", "text", "global&#95;mesh"),
    ]
    assert found[3:] == [(2, "inference_eval/samples/text_summary", "text", markdown_table(rows))]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


class Page(HTMLParser):
    """What a browser shows: the texts of the cells of each row, of what is in no table, and the elements."""

    def __init__(self, html):
        super().__init__()
        self.cells, self.text, self.elements, self._in_cell = [], "", set(), False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.cells[-1].append("")
        if tag == "br":
            self.handle_data("\n")

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1][-1] += data
        else:
            self.text += data


TABLE = {"table", "thead", "tbody", "tr", "th", "td"}
MARKDOWN = [
    "5*3=15 and 4*2=8",
    "__init__ and _this_ and **that**",
    "![x](http://example.com/seen.png) [y](http://example.com) <http://example.com>",
    "| a | b |\n|---|---|\n| c | d |",
    "# head\n\n- list\n\n1. one\n\n> quote\n\n---\n\n    code\n\n```\nfence\n```\n~~~\n",
    "`code` ``more`` \\\\ \\* &amp; &#42; <b>bold</b> <!-- no --> <script>x</script>",
    "  two spaces  \n\n ends ",
    "[ref]: http://example.com\n[ref]",
    "\x02klzzwxh:0001\x03 \x00 \x1b[31m \t \r \u2028 \x85 \u202e \ud800",
]
"""Texts in which Markdown, or what TensorBoard makes of it, knows something."""


def random_texts(count):
    rng = random.Random(0)
    parts = [*string.punctuation, "    ", "\n", "\n\n", "a", "1.", "é", "字", "http://", "![", "](", "**", "__", "```"]
    return ["".join(rng.choices(parts, k=rng.randrange(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("texts", [MARKDOWN, random_texts(300)], ids=["known", "random"])
def test_tensorboard_shows_a_text_as_it_is(texts):
    to_html = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html
    page = Page(to_html(markdown_table([row(2, text, **{"a_*b*_|c": 0.25}) for text in texts])))
    assert page.elements <= {*TABLE, "br"}
    assert [len(cells) for cells in page.cells] == [11] * (len(texts) + 1) and page.cells[0][-1] == "a_*b*_|c"
    for text, cells in zip(texts, page.cells[1:], strict=True):
        assert cells[4] == printable(text)
        alone = Page(to_html(escape_markdown(text)))
        assert alone.elements <= {"p", "br"} and alone.text == printable(text)


def test_a_row_of_the_table_is_one_line_whatever_the_model_says():
    looped = dataclasses.replace(row(2, "a | b\nc", good=0.25), health="loop", loop_from=3)
    rule, first, second = markdown_table([looped, row(2, "d")]).splitlines()[1:]
    assert rule.count("---") == 11
    assert first == "| 2 | 0 | 0 | What&#63; | a &#124; b<br>c | 4 | stop | -0.5 | loop | 3 | 0.25 |"
    assert second == "| 2 | 0 | 0 | What&#63; | d | 4 | stop | -0.5 |  |  |  |"


@pytest.mark.parametrize(("rounds_step", "rounds_at_2"), [(2, [2]), (1, [])])
def test_a_run_that_goes_on_has_each_step_once(tmp_path, rounds_step, rounds_at_2):
    # The reader of TensorBoard's own pages, which has numbers as tensors.
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")

    def steps(name):
        read = accumulator.EventAccumulator(str(directory))
        read.Reload()
        return [event.step for event in read.Tensors(name)]

    def start(steps, rewound):
        tracker = BackgroundTracker(build_tracker((TensorboardTrackerConfig(),), tmp_path, "name"), leader_only)
        if rewound:
            rounds = ["inference_eval/", "eval/"]
            rewind_tracker(tracker, step=2, rounds_step=rounds_step, rounds=rounds)
        for step in steps:
            if not rewound or step > 2:
                tracker.log({"train/loss": float(step)}, step=step)
            if not rewound or step > rounds_step:
                tracker.log({"inference_eval/judge": 1.0, "eval/t/acc": 1.0}, step=step)
                tracker.log_rows("inference_eval/samples", [row(step, "text")], step=step)
        tracker.finish()
        assert not tracker.errors

    directory = tmp_path / "tensorboard"
    start([1, 2, 3, 4], rewound=False)
    (file,) = directory.iterdir()
    file.write_bytes(file.read_bytes()[:-3])  # the process was killed while it wrote
    file.rename(directory / "events.out.tfevents.0.earlier")
    start([], rewound=True)
    assert steps("train/loss") == [1, 2]
    assert steps("inference_eval/samples/text_summary") == [1, *rounds_at_2]
    for path in directory.iterdir():
        if path != directory / "events.out.tfevents.0.earlier":
            path.unlink()
    start([2, 3, 4, 5], rewound=True)
    for name in ("train/loss", "inference_eval/judge", "eval/t/acc", "inference_eval/samples/text_summary"):
        assert steps(name) == [1, 2, 3, 4, 5]


def test_a_directory_of_all_runs(tmp_path):
    build_tracker(TensorboardTrackerConfig(logdir=str(tmp_path / "all")), tmp_path / "run", "name").finish()
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["name"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ConfigError, match=r"tensorboard, which cannot start in .*tensorboard: .*type: jsonl"):
        build_tracker(TensorboardTrackerConfig(), tmp_path, "name")


def test_tensorboard_itself_reads_the_files(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = build_tracker(TensorboardTrackerConfig(), tmp_path, "name")
    tracker.log({"train/loss": 1.5}, step=1)
    tracker.log_rows("samples", [row(2, "text")], step=2)
    tracker.finish()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 1.5)]
    (event,) = found.Tensors("samples/text_summary")
    assert event.step == 2 and event.tensor_proto.string_val[0].decode() == markdown_table([row(2, "text")])


def test_a_bucket_is_no_place_for_event_files():
    with pytest.raises(ConfigError, match=r"tracker\.logdir is 'gs://bucket/all'"):
        TensorboardTrackerConfig(logdir="gs://bucket/all")


def test_names_of_metrics_have_no_control_characters(tmp_path):
    tracker = build_tracker(TensorboardTrackerConfig(), tmp_path, "run")
    tracker.log({"data/\x1b[2J\udcff\n<b>é": 1.0, "\x1b]0;x\x07": "text"}, step=1)
    tracker.finish()
    tags = {tag for _, tag, _, _ in values(tmp_path / "tensorboard")}
    assert len(tags) == 2 and all(tag.isprintable() for tag in tags)
