"""Draws samples.svg from a run's samples: what the terminal shows at the first and at the last round.

Run it in the repository's environment, after ``make demo``::

    .venv/bin/python docs/images/make_samples.py runs/<id>/samples.jsonl
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from lockstep.report import Row, print_table, read_jsonl

WIDTH = 88
ROWS = 6
OUTPUT = Path(__file__).with_name("samples.svg")


def draw(path: Path, title: str) -> str:
    """The first and the last round of a file of samples as one SVG, the same bytes for the same samples."""
    rows = [Row.from_dict(record) for record in read_jsonl(path)]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for step in (rows[0].step, rows[-1].step):
        of_step = [row for row in rows if row.step == step]
        name = f"inference_eval: what the model says after {step} steps"
        print_table(of_step, title=name, max_rows=ROWS, console=console)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="samples")
    # A picture in a README may not load fonts from elsewhere; the reader's monospace font serves as well.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Write the picture beside this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="samples.jsonl of a run")
    parser.add_argument("--title", default="make demo")
    options = parser.parse_args()
    OUTPUT.write_text(draw(options.samples, options.title), encoding="utf-8")
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
