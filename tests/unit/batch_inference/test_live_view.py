import dataclasses

from lockstep.batch_inference.live_view import LineView, line, panel
from tests.unit.batch_inference.made_up_progress import JOB, shown


def test_the_panel_and_the_line_say_all_of_it():
    text = shown(panel(JOB, "sample"))
    assert "340 of 600" in text
    for part in ("700 of 1,200 (200 were there from before)", "5,000 tokens/s, 0.42 of the bandwidth floor"):
        assert part in text
    for part in ("900 of 2,048 pages in use", "0:25 so far, 0:25 left", "3,000", "2,000", "done"):
        assert part in text
    assert line(JOB) == (
        "sample: 340 of 600 prompts, 700 of 1,200 completions, 5,000 tokens/s (3,000 + 2,000), "
        "0.42 of the bandwidth floor, 900 of 2,048 pages in use, 0:25 left"
    )


def test_lines_come_every_few_seconds_and_at_the_end():
    printed, now = [], [0.0]
    view = LineView(printed.append, every_s=10.0, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        view.update(dataclasses.replace(JOB, found=second))
    assert len(printed) == 3
    view.close()
    view.close()
    assert len(printed) == 4
    view.update(dataclasses.replace(JOB, found=24))
    view.close()
    assert len(printed) == 4, "no line is printed twice"
