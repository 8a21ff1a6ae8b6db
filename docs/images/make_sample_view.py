"""Draws the live view and the summary of ``lockstep sample`` as SVG, from figures of a run of config/sampler/demo.yaml.

``python docs/images/make_sample_view.py runs/sample-demo`` writes docs/images/sample_view.svg.
"""

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from lockstep.report.table import terminal_table
from lockstep.sampler.progress import HostProgress, JobProgress
from lockstep.sampler.report import Outcome, first_rows, summary_table
from lockstep.sampler.totals import Totals
from lockstep.sampler.view import panel

OUTPUT = Path(__file__).with_name("sample_view.svg")


def main() -> None:
    """Read a run, draw, write."""
    run = Path(sys.argv[1])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    live = [record for record in logged if "sample/progress/rows_done" in record][-1]
    last = logged[-1]
    merged = run / "samples" / "samples.jsonl"
    totals = Totals()
    with open(merged, "rb") as lines:
        totals.add(lines)
    rates = [value for key, value in sorted(live.items()) if key.endswith("/tokens_per_second") and "host_" in key]
    seconds = last["sample/time/generate_s"]
    job = JobProgress(
        rows=totals.rows,
        found=0,
        hosts=[HostProgress(rows=totals.rows // 4, tokens=int(rate * seconds / 2), seconds=seconds / 2, pages=130,
                            max_pages=260, floor=rate / 0.1) for rate in rates],
        seconds=seconds / 2,
    )  # fmt: skip
    outcome = Outcome(
        totals=totals,
        prompts=int(last["sample/total_prompts"]),
        hosts=int(last["sample/num_hosts"]),
        mode=last["sample/inference_mode"],
        found=0,
        tokens=totals.tokens,
        seconds=seconds,
        load_s=last["sample/time/load_s"],
        loaded_bytes=int(last["sample/load_bytes_per_second"] * last["sample/time/load_s"]),
        memory={},
    )
    console = Console(record=True, width=96, file=io.StringIO())
    console.print(panel(job, "sample: 32 prompts × 4 answers × 2 rounds, host_data_parallel on 2 hosts"))
    console.print("", summary_table(outcome))
    console.print("", terminal_table(first_rows(merged, 5), title=f"sample: the first of {totals.rows} answers"))
    console.save_svg(str(OUTPUT), title="lockstep sample")


if __name__ == "__main__":
    main()
