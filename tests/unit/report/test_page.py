import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import append_jsonl
from lockstep.report.page import MAX_POINTS, SCRIPTS, escape_json, make_payload, read_series, render_page, write_page
from lockstep.report.saved_rows import find_run

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "a\u2028b\u2029",
    "\u202egnp.exe",
    "\ud800",
    "\udc00\ud800",
    "\x00\x1b[31m",
    "𝒳😀",
    "ﾜ&amp;",
]


class Reader(HTMLParser):
    """The elements of a page, and the text of each script and style, as an HTML parser has them."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.attributes, self.inside = [], {}, {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts.setdefault(tag, []).append("")
        self.attributes.setdefault(tag, []).append(dict(attrs))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside][-1] += data


def test_json_in_a_page_reads_as_it_was_and_has_nothing_that_ends_it():
    value = {text: [text] for text in HOSTILE}
    text = escape_json(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029\u202e\ud800-\udfff\x00-\x1f]", text)
    assert "😀" in text and "ﾜ" in text
    text.encode()
    with pytest.raises(ValueError, match="Out of range"):
        escape_json(float("nan"))


def test_the_policy_allows_the_one_style_and_the_one_script_and_nothing_else():
    page = render_page({"texts": HOSTILE}, "a <b> \ud800 & title")
    found = Reader(page)
    assert found.tags.count("script") == 2 and found.tags.count("style") == 1
    data, script = found.texts["script"]
    assert json.loads(data) == {"texts": HOSTILE}
    policy = next(
        each["content"] for each in found.attributes["meta"] if each.get("http-equiv") == "Content-Security-Policy"
    )
    for kind, text in (("style-src", found.texts["style"][0]), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert found.texts["title"] == [r"a <b> \ud800 & title"] == found.texts["h1"]
    assert not re.search(
        r"""(src|href|action)\s*=|https?:|url\(|@import""", page.replace("http://www.w3.org/2000/svg", "")
    )


def test_every_part_of_the_page_is_used_and_ships():
    folder = ROOT / "src" / "lockstep" / "report" / "html"
    assert {path.name for path in folder.iterdir()} == {*SCRIPTS, "page.css", "page.html.j2"}
    assert '"lockstep.report" = ["html/*"]' in (ROOT / "pyproject.toml").read_text()


def test_no_part_makes_elements_of_text():
    for path in (ROOT / "src" / "lockstep" / "report" / "html").glob("*.js"):
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text
        ), path


def test_a_page_is_replaced_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_page("né", path) == 3
    assert path.read_bytes() == "né".encode() and list(tmp_path.iterdir()) == [path]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        write_page("new", tmp_path / "folder")
    assert {each.name for each in tmp_path.iterdir()} == {"report.html", "folder"}


def row(step=0, prompt_id=0, prompt="p", text="x", **more):
    return {"step": step, "prompt_id": prompt_id, "prompt": prompt, "generated_text": text, **more}


def run_of(directory, *rows):
    append_jsonl(directory / "samples.jsonl", rows)
    return find_run(directory)


def test_columns_are_side_by_side_and_texts_are_there_once(tmp_path):
    rows = [
        row(0, text="a", reward=0.1234567, finish_reason="stop"),
        row(5, text="a", reward=None, finish_reason="stop"),
        row(5, 1, "q", "b", judge="ok", mean_logprob="NaN"),
    ]
    (run,) = make_payload([run_of(tmp_path, *rows)])["runs"]
    assert (run["when"], run["prompt"], run["generation"]) == ([0, 5, 5], [0, 0, 1], [0, 0, 0])
    assert (run["texts"], run["text"]) == (["a", "b"], [0, 0, 1])
    assert (run["reasons"], run["reason"]) == (["stop", ""], [0, 0, 1])
    assert run["numbers"] == {"reward": [0.123457, None, None], "mean_logprob": [None, None, "NaN"]}
    assert run["words"] == {"judge": [None, None, "ok"]}
    json.dumps(run, allow_nan=False)


def test_metrics_come_before_what_every_row_has(tmp_path):
    run = run_of(tmp_path, row(num_tokens=3, mean_logprob=-1.0, reward=1.0))
    assert list(make_payload([run])["runs"][0]["numbers"]) == ["reward", "num_tokens", "mean_logprob"]


def test_a_prompt_is_its_number_and_its_text(tmp_path):
    rows = [row(0, 7, "a"), row(1, 7, "b"), row(2, 7, "a"), row(2, 8, "a")]
    payload = make_payload([run_of(tmp_path, *rows)])
    assert [(each["key"], each["id"], each["text"]) for each in payload["prompts"]] == [
        ("7", 7, "a"),
        ("7.2", 7, "b"),
        ("8", 8, "a"),
    ]
    assert payload["runs"][0]["prompt"] == [0, 1, 0, 2]


def test_prompts_of_two_runs_meet_by_their_texts(tmp_path):
    first = run_of(tmp_path / "a", row(0, 0, "a"), row(0, 1, "b"), row(0, 2, "b"))
    second = run_of(tmp_path / "b", row(0, 0, "b"), row(0, 1, "c"), row(0, 2, "a"), row(0, 3, "b"), row(0, 4, "b"))
    payload = make_payload([first, second])
    assert [each["text"] for each in payload["prompts"]] == ["a", "b", "b", "c", "b"]
    assert payload["runs"][1]["prompt"] == [1, 3, 0, 2, 4]
    assert len({each["key"] for each in payload["prompts"]}) == 5


def test_a_later_row_takes_the_place_of_an_earlier_one_and_it_is_said(tmp_path):
    payload = make_payload([run_of(tmp_path / "run", row(text="old"), row(1), row(text="new"))])
    assert payload["runs"][0]["texts"] == ["x", "new"] and payload["runs"][0]["when"] == [1, 0]
    assert payload["notes"] == [
        "run: 1 rows are not shown, because a later row has the same step, prompt and generation."
    ]


def test_curves_that_were_thinned_are_said(tmp_path):
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "loss": n / 3} for n in range(5000)])
    payload = make_payload([run_of(tmp_path, row())])
    assert "the curve loss shows 998 of its 5,000 points." in payload["notes"][0]
    assert len(payload["runs"][0]["series"]["loss"]["steps"]) == 998


def test_steps_that_were_traced_lead_to_their_trace(tmp_path):
    for name in (
        "steps-3-5/process-000.xplane.pb",
        "steps-3-5/process-003.xplane.pb",
        "steps-3-5/process-003.trace.json.gz",
    ):
        (file := tmp_path / "profiler/plugins/profile" / name).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    payload = make_payload([run_of(tmp_path, row(4))])
    assert payload["runs"][0]["traces"] == [[3, 5, "profiler/plugins/profile/steps-3-5"]]
    (note,) = payload["notes"]
    assert f"steps 3 to 5 were traced on processes 0, 3: tensorboard --logdir {tmp_path / 'profiler'}" in note


def test_another_number_of_processes_is_a_mark_and_a_line_and_no_curve(tmp_path):
    sizes = {1: (4, 2), 3: (4, 2), 5: (2, 1), 7: (4, 2)}
    for step in range(1, 9):
        job = dict(zip(("job/processes", "job/slices"), sizes.get(step, ()), strict=False))
        append_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "train/loss": 1 / step, **job}])
    payload = make_payload([run_of(tmp_path, row(4))])
    (run,) = payload["runs"]
    four, two = "4 processes in 2 slices", "2 processes in 1 slice"
    assert run["changes"] == [(5, f"{two}, before {four}", 2), (7, f"{four}, before {two}", 4)]
    assert payload["notes"] == [f"{run['name']}: from step {step} on {text}." for step, text, _ in run["changes"]]
    assert list(run["series"]) == ["train/loss"]
    run_of(tmp_path / "one", row(4))
    append_jsonl(tmp_path / "one/metrics.jsonl", [{"step": n, "job/processes": n, "job/slices": 1} for n in (1, 2)])
    payload = make_payload([find_run(tmp_path / "one")])
    assert payload["runs"][0]["changes"] == [(2, "2 processes, before 1 process", 2)]


def test_rollouts_are_in_the_page_of_their_run_as_prompts_of_their_own(tmp_path):
    append_jsonl(tmp_path / "rollouts.jsonl", [row(1, 0, "p", "good", reward=1.0, rank="best", gsm8k=1.0)])
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "inference_eval/step": 1, "a": 2}])
    run = run_of(tmp_path, row(1, 0, "p", "sample", gsm8k=0.0))
    payload = make_payload([run])
    assert [(prompt["key"], prompt["text"], prompt["rollout"]) for prompt in payload["prompts"]] == [
        ("0", "p", False),
        ("0.2", "p", True),
    ]
    (shown,) = payload["runs"]
    assert shown["files"] == ["samples.jsonl", "rollouts.jsonl", "metrics.jsonl"]
    assert list(shown["numbers"]) == ["reward", "gsm8k"] and shown["words"] == {"rank": [None, "best"]}
    assert list(shown["series"]) == ["reward/mean", "a"], "a step over steps is no curve"
    assert not payload["notes"]


def test_health_is_there_by_row_in_strips_and_with_its_alarms(tmp_path):
    rows = [row(0, health="loop cut"), row(0, 1, health=""), row(0, health="cut"), row(5, health=None)]
    alarm = {"step": 5, "state": "loop", "began": 0}
    append_jsonl(tmp_path / "health.jsonl", [{"step": 5, "name": "inference_eval", "alarm": alarm, "line": "loop"}])
    (run,) = make_payload([run_of(tmp_path, *rows)])["runs"]
    assert [run["healths"][place] if place is not None else None for place in run["health"]] == ["", "cut", None]
    assert run["strips"]["samples"]["answers"] == [2] and run["strips"]["samples"]["states"]["cut"] == [1]
    assert [(told["name"], told["began"], told["line"]) for told in run["alarms"]] == [("inference_eval", 0, "loop")]
    assert "health.jsonl" in run["files"]


def test_token_log_probabilities_are_kept_by_row(tmp_path):
    run = run_of(tmp_path, row(), row(1, tokens=["a", "b"], token_logprobs=[-0.5, "-Infinity"]))
    assert make_payload([run])["runs"][0]["tokens"] == {"1": {"texts": ["a", "b"], "logprobs": [-0.5, "-Infinity"]}}


def test_what_cannot_be_shown_is_refused(tmp_path):
    steps = run_of(tmp_path / "steps", row())
    append_jsonl(
        tmp_path / "rounds" / "samples.jsonl", [{"round": 0, "prompt_id": 0, "prompt": "p", "generated_text": "x"}]
    )
    with pytest.raises(
        LockstepError, match=r"rows with a step \(steps\) and rows with a round \(rounds\) cannot be shown"
    ):
        make_payload([steps, find_run(tmp_path / "rounds")])
    assert make_payload([find_run(tmp_path / "rounds")])["axis"] == "round"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no samples\.jsonl"):
        make_payload([find_run(tmp_path / "empty")])
    (tmp_path / "empty" / "samples.jsonl").write_text("")
    with pytest.raises(LockstepError, match=r"samples\.jsonl has no rows yet\. Wait"):
        make_payload([find_run(tmp_path / "empty")])


def test_curves_are_read_and_the_last_value_of_a_step_counts(tmp_path):
    records = [
        {"step": 1, "time": 3.0, "loss": 2.0, "name": "x"},
        {"step": 0, "loss": "NaN"},
        {"step": 1, "loss": 1.0, "ok": True},
    ]
    append_jsonl(tmp_path / "metrics.jsonl", records)
    series = read_series([tmp_path / "metrics.jsonl"])
    assert list(series) == ["loss", "ok"]
    assert (
        list(series["loss"].steps) == [0, 1]
        and math.isnan(series["loss"].values[0])
        and series["loss"].values[1] == 1.0
    )
    assert list(series["ok"].values) == [1.0]


def test_a_long_curve_keeps_its_ends_and_its_extremes(tmp_path):
    values = [math.sin(n / 50) for n in range(20_000)]
    values[7_777], values[12_345], values[5_000] = 50.0, -50.0, math.nan
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "loss": value} for n, value in enumerate(values)])
    curve = read_series([tmp_path / "metrics.jsonl"])["loss"]
    assert curve.points == 20_000 and len(curve.steps) <= MAX_POINTS + 1
    assert list(curve.steps) == sorted(set(curve.steps)) and (curve.steps[0], curve.steps[-1]) == (0, 19_999)
    assert {7_777, 12_345, 5_000} <= set(curve.steps)
    assert all(
        a == b or math.isnan(a) for a, b in zip(curve.values, (values[step] for step in curve.steps), strict=True)
    )


@pytest.mark.parametrize("step", [None, "7", True, 1.5])
def test_a_line_without_a_step_is_said_with_its_number(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n' + json.dumps({"step": step, "loss": 2}) + "\n")
    with pytest.raises(LockstepError, match=r"metrics\.jsonl:2: the column 'step' is .*; a whole number was expected"):
        read_series([path])


def test_half_of_a_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo')
    assert list(read_series([tmp_path / "metrics.jsonl"])["loss"].steps) == [1]
