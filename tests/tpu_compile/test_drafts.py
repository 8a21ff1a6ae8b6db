"""The programs that verify drafts, through the TPU compiler; and what ``lockstep plan`` promises of them."""

import pytest

from tests.tpu_compile.test_planner import TINY, plan
from tests.tpu_compile.test_programs import compiled

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")


@pytest.mark.nightly  # in make slow: test_planner.py
def test_a_plan_says_what_drafts_promise(tmp_path):
    arguments = ("--config_path", TINY, "--topology", "v6e-8", "--inference_eval.max_new_tokens", "32")
    code, text, found = plan(*arguments, "--inference_eval.drafts", "auto", cache=tmp_path)
    assert code == 0, text
    samples = found["sampling"]["inference_eval"]
    assert {"verify_8", "verify_32"} <= samples["digests"].keys()
    narrow, wide = samples["drafts"]
    assert (narrow["width"], wide["width"]) == (8, 32)
    decoded = narrow["bytes_per_decoded_token"]
    assert decoded > 2 * narrow["bytes_per_accepted_token"] > 2 * wide["bytes_per_accepted_token"] > 0
    assert narrow["tokens_per_s"] > samples["predicted_at_best"]["tokens_per_s"]
    lines = text.splitlines()
    (head,) = [at for at, line in enumerate(lines) if line.startswith(" if all drafts are right")]
    for line, each in zip(lines[head + 2 :], (narrow, wide), strict=False):
        assert f"inference_eval: {each['width']} tokens at a time" in line and "…" not in line
        assert f"{each['tokens_per_s']:,.0f}" in line


@pytest.mark.nightly
@pytest.mark.parametrize("slice_name", ["v5p-16", "v6e-16"])
def test_programs_of_llama_3_1_8b(slice_name):
    """The kernels write and read K/V in place, nothing makes another pool, no collective leaves a replica."""
    found = compiled(slice_name, 4, 8, drafts=True)
    for width, most in ((8, 1 / 4), (64, 1 / 20)):
        program = found["programs"][f"verify_{width}"]
        assert program["pool_copies"] == program["pool_scatters"] == 0
        assert program["aliased"] == found["pool"]
        assert program["kernels"] == 2, "write and attend, inside the loop over layers"
        steps = [one for one in program["collectives"] if one["in_step"]]
        assert not any(one["crosses_replicas"] for one in steps)
        gathers = sum(one["times"] for one in steps if one["kind"] == "all-gather")
        assert gathers == 2 * -(-width // 32), "32 positions of 8 sequences are drawn together"
        assert program["temporaries"] + program["code"] <= found["predicted"]["verify"]
        assert found["verify"][str(width)]["per_accepted_token"] < most * found["per_token"]
