"""What TensorBoard finds in the files, read as TensorBoard reads them."""

import struct

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from lockstep.errors import ConfigError
from lockstep.report import JsonlTrackerConfig, build_tracker, read_jsonl
from lockstep.report.trackers import TensorboardTrackerConfig
from lockstep.report.trackers.tensorboard import markdown_table
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
        (2, "inference_eval/mode/text_summary", "text", "global_mesh"),
    ]
    assert found[3:] == [(2, "inference_eval/samples/text_summary", "text", markdown_table(rows))]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_row_of_the_table_is_one_line_whatever_the_model_says():
    head, rule, first, second = markdown_table([row(2, "a | b\n<b>`c`", good=0.25), row(2, "d")]).splitlines()
    assert head == (
        "| step | prompt_id | generation_id | prompt | generated_text | num_tokens | finish_reason | mean_logprob "
        "| good |"
    )
    assert rule.count("---") == 9
    assert first == "| 2 | 0 | 0 | What? | a \\| b<br>&lt;b>\\`c\\` | 2 | stop | -0.5 | 0.25 |"
    assert second == "| 2 | 0 | 0 | What? | d | 2 | stop | -0.5 |  |"


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
