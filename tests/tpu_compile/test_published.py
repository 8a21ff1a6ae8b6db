"""Published steps against what a plan gives for them, and the plan's sizes against a program of the TPU compiler."""

import math
import re

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks import published
from benchmarks.tpu_train_step import workload_of
from lockstep.models.attention import attention_products
from lockstep.plan import least_time, make_plan
from lockstep.plan.step_time import DECODE_ERRORS, DECODE_OVER_BEST, EXPECTED_ERRORS, EXPOSED_BYTES, train_time
from lockstep.xla import CompileCache, Hlo, topology
from tests.snippets import lacking


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
            patch.setenv(name, "1")
        yield published.figures(published.train_rows(), published.decode_rows())


def test_a_published_step_takes_at_least_what_the_plan_gives_and_at_most_twice_that(found):
    rows = {row["name"]: row for row in found["rows"]}
    train = [rows[row.name] for row in published.TRAIN]
    assert len(train) == 10 and all(row["must_hold"] for row in train), "all reach half of the peak of their chips"
    for row in train:
        assert 0.5 <= row["best_over_published"] <= 1, row
    assert (found["lowest"], found["highest"]) == (
        min(row["best_over_published"] for row in train),
        max(row["best_over_published"] for row in train),
    )


def test_a_published_decode_step_is_about_twice_the_floor(found):
    decode = [row for row in found["rows"] if "floor_s" in row]
    assert [round(row["published_over_floor"], 1) for row in decode] == [1.9, 2.3, 2.5, 2.2, 2.7]
    assert all(row["floor_s"] < row["best_s"] < row["published_s"] for row in decode)


def test_what_the_plan_expects_is_fitted_to_these_rows(found):
    assert round(found["exposed_bytes"], 5) == EXPOSED_BYTES
    assert round(found["decode_over_best"], 2) == DECODE_OVER_BEST
    for errors, told in ((found["train_errors"], EXPECTED_ERRORS), (found["decode_errors"], DECODE_ERRORS)):
        assert tuple(round(error, 2) for error in errors) == told


def test_the_page_shows_these_rows(found):
    assert lacking("docs/plan.md:text:1", published.table(found["rows"])) is None


def product_flops(text):
    """The operations of all matrix products of a TPU program, kernels left out."""
    hlo = Hlo(text)

    def of(computation, op):
        labels = re.search(r"dim_labels=\w+_(\w+)->", op.line)[1]
        right = hlo.array_of(computation, op.operands[1])[0].dims
        window = re.search(r"window=\{size=([\dx]+)(?:[^}]*?pad=([\d_x]+))?", op.line)
        summed = right[labels.index("i")]
        if window:  # an axis that is padded has one element that counts for each of its results
            sizes = [int(size) for size in window[1].split("x")]
            pads = window[2].split("x") if window[2] else ["0_0"] * len(sizes)
            summed *= math.prod(size for size, pad in zip(sizes, pads, strict=True) if pad == "0_0")
        return 2 * math.prod(op.arrays[0].dims) * summed

    def inside(computation):
        total = 0
        for op in hlo.computations[computation].values():
            if op.kind == "convolution":
                total += of(computation, op)
            elif op.kind == "fusion":
                total += sum(map(inside, op.called()["calls"]))
        return total

    total = 0
    for run in hlo.runs:
        if run.op.kind == "convolution":
            total += run.times * of(run.computation, run.op)
        elif run.op.kind == "fusion":
            total += run.times * sum(map(inside, run.op.called()["calls"]))
    return total


@pytest.mark.nightly
def test_by_sizes_alone_a_step_takes_what_its_program_takes(monkeypatch):
    """The products of the program are those that are counted; what it receives is what FSDP needs, and some more."""
    for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "1")
    (case,) = (row.case for row in published.TRAIN if row.name == "llama-3.1-8b, v6e-8")
    workload, slice_ = workload_of(case), topology(case.slice_name)
    plan = make_plan(workload, slice_, CompileCache(case.slice_name, None, lambda *_: None))
    assert plan.fits and plan.training is not None
    config = workload.model
    pairs = config.num_layers * attention_products(config.attn_backend, case.length, None, forwards=2)
    attention = 2 * config.num_heads * config.head_size * pairs * case.sequences * case.length
    products = product_flops(plan.training.summary.text) * len(slice_.devices)
    assert products == pytest.approx(plan.training.flops - attention, rel=0.01)
    compiled, by_sizes = train_time(plan), least_time(workload, slice_)
    assert compiled is not None and by_sizes.step_s == compiled.step_s == compiled.compute_s
    assert by_sizes.memory_s == compiled.memory_s
    assert 1 <= compiled.collectives_s / by_sizes.collectives_s < 1.25
