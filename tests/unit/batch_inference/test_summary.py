"""What is said of a finished job."""

from lockstep.batch_inference.summary import Outcome, Totals, metrics, summary_table
from tests.unit.batch_inference.made_up_progress import shown


def test_figures_have_the_promised_names():
    totals = Totals(rows=20, tokens=190, finish={"stop": 20}, sums={"gsm8k": 5.0}, counts={"gsm8k": 20})
    outcome = Outcome(
        totals=totals,
        prompts=5,
        hosts=2,
        mode="host_data_parallel",
        found=4,
        tokens=160,
        seconds=2.0,
        load_s=4.0,
        loaded_bytes=2**30,
        memory={"before_load": 2**30, "peak": 3 * 2**30},
    )
    values = metrics(outcome)
    assert {name: values[name] for name in list(values)[:5]} == {
        "sample/total_prompts": 5,
        "sample/total_generated_tokens": 190,
        "sample/num_hosts": 2,
        "sample/inference_mode": "host_data_parallel",
        "sample/tokens_per_second": 80.0,
    }
    assert values["sample/gsm8k"] == 0.25
    assert values["sample/hbm/peak_bytes"] == 3 * 2**30
    text = shown(summary_table(outcome))
    for part in (
        "20 for 5 prompts, 4 of them from before",
        "mean 0.25",
        "80 tokens/s",
        "256.00 MiB/s",
        "peak 3.00 GiB",
    ):
        assert part in text
