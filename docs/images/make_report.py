"""Draws report.png and report-two-runs.png: the page of ``lockstep report`` for a run, and for two.

Run it in the repository's environment with the extras ``browser`` and ``figures`` and a chromium::

    .venv/bin/python docs/images/make_report.py runs/<demo> runs/<first> runs/<second>

Those in the repository are of ``make demo`` with ``--inference_eval.eval_every 25``, and of two runs of ``train-grpo``
on sums, which learn from 64 and from 256 questions.
"""

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from lockstep.report import find_run, make_payload, render_page, write_page

FOLDER = Path(__file__).parent
SIZE = {"width": 1440, "height": 880}


def main() -> None:
    """Write the pictures beside this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "first", "second"):
        parser.add_argument(name, type=Path, help="the directory of a run")
    options = parser.parse_args()
    draw("report.png", "light", "step=300&base=100&mode=difference&prompt=0", options.run)
    draw("report-two-runs.png", "dark", "base=other&mode=difference&prompt=3", options.first, options.second)


def draw(name: str, scheme: str, address: str, *directories: Path) -> None:
    """Draw the page of some runs as a picture of 256 colours."""
    runs = [find_run(directory) for directory in directories]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        write_page(render_page(make_payload(runs), " and ".join(run.name for run in runs)), page)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
        tab.goto(f"file://{page}#{address}")
        tab.wait_for_timeout(500)
        picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        browser.close()
    picture.quantize(256, dither=Image.Dither.NONE).save(FOLDER / name, optimize=True)
    print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
