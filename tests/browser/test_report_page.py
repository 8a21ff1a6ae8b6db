"""The page of ``lockstep report`` in a real browser: hostile outputs, differences, keys, addresses, speed."""

import contextlib
import json
import random
import re
import socket
import time
import urllib.parse

import pytest

from lockstep.report import append_jsonl, find_run, make_payload, render_page, write_page
from tests.browser.browser import chromium

HOSTILE = [
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 1</script>",
    "<!--<script>",
    "--><img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1><style>*{display:none}</style>",
    '"><iframe srcdoc="<script>parent.pwned = 1</script>">',
    "&lt;b&gt; &amp; ]]> {{ 7 * 7 }} {% raw %} ${7 * 7}",
    "safe\u202egnp.exe\u202c \u2066isolated\u2069 \u200b\ufeff",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J \x9b31m",
    "nul\x00 bell\x07 back\x08\x08\x08 delete\x7f",
    "\ud800 lone \udfff\ud800 \udc00 twice \ud800\ud800",
    "line\u2028separator\u2029paragraph\x85next",
    "😀👩‍👩‍👧 𝒳 עברית العربية 日本語のテキスト",
    "Z" + "\u0351\u0363\u035b" * 60 + "algo",
    "tabs\tand\r\nlines\n\n\n   spaces   ",
    "__proto__",
    "",
]
LINE = "x" * 1_000_000
WORDS = "word " * 200_000


def visible(text):
    """The text as the page shows it: escapes in the place of what would not be seen."""
    hidden = (
        "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    )

    def escape(match):
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return re.sub(f"[{hidden}]", escape, text)


def until(page, condition, timeout_s=60.0):
    """Wait for a condition in the page, which its policy does not let the browser's own waiting evaluate."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(Exception):  # the page may be loading itself again
            if page.evaluate(condition):
                return
        page.wait_for_timeout(20)
    raise AssertionError(f"not in {timeout_s} s: {condition}")


class Reports:
    """Opens pages of rows, and keeps what the browser complains about and asks for."""

    def __init__(self, browser, directory):
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
        self.directory, self.count = directory, 0
        self.problems, self.requests = [], []

    def write(self, *runs, reload_s=None, place=None):
        """The file of a report; a run is its rows, or its rows, metrics, rows of rollouts, and lines of health."""
        self.count += 1
        found = []
        for number, run in enumerate(runs):
            rows, metrics, rollouts, health = (*run, [], [])[:4] if isinstance(run, tuple) else (run, [], [], [])
            directory = self.directory / f"{self.count}" / f"run{number}"
            directory.mkdir(parents=True, exist_ok=True)
            # json.dumps writes lone surrogates as escapes, which a file can have and append_jsonl cannot write.
            (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            append_jsonl(directory / "metrics.jsonl", metrics)
            if rollouts:
                append_jsonl(directory / "rollouts.jsonl", rollouts)
            if health:
                append_jsonl(directory / "health.jsonl", health)
            found.append(find_run(directory))
        place = place or self.directory / f"{self.count}.html"
        write_page(render_page(make_payload(found, reload_s=reload_s), "a <b>title</b>"), place)
        return place

    def open(self, place, **state):
        page = self.context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(f"file://{place}#{urllib.parse.urlencode(state)}")
        until(page, "performance.getEntriesByName('report-shown').length > 0")
        return page


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    with chromium() as browser:
        found = Reports(browser, tmp_path_factory.mktemp("reports"))
        yield found


@pytest.fixture
def page_of(reports):
    """Opens a report; afterwards the browser must not have complained, nor asked for anything but the file."""
    opened = []
    reports.problems.clear()
    reports.requests.clear()

    def page_of(*runs, **state):
        opened.append(reports.open(reports.write(*runs), **state))
        return opened[-1]

    yield page_of
    for page in opened:
        page.close()
    assert not reports.problems
    assert {url.partition(":")[0] for url in reports.requests} <= {"file"}


def row(step, prompt_id, text, prompt=None, generation_id=0, **more):
    prompt = f"prompt {prompt_id}" if prompt is None else prompt
    return {
        **{"step": step, "prompt_id": prompt_id, "generation_id": generation_id},
        **{"prompt": prompt, "generated_text": text, "num_tokens": 3, "finish_reason": "stop", **more},
    }


def drawn(page):
    """Wait until what was changed is shown."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def go(page, **state):
    page.evaluate("(hash) => { location.hash = hash; }", urllib.parse.urlencode(state))
    drawn(page)


def check_state(page, state):
    """The address follows what is shown, after a moment."""

    def found():
        return dict(urllib.parse.parse_qsl(page.evaluate("location.hash.slice(1)")))

    end = time.monotonic() + 20
    while found() != state and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert found() == state


def parts_of(page):
    """The pieces of a difference: what kind, and the text."""
    script = "all => all.map(each => [each.tagName.toLowerCase(), each.textContent])"
    return page.eval_on_selector_all(".answer > :is(span, ins, del)", script)


def shown_prompts(page):
    return page.eval_on_selector_all(".item .item-prompt", "all => all.map(each => each.textContent)")


EACH = """async (addresses) => {
  const text = (name) => document.querySelector(name)?.textContent;
  const found = [];
  for (const address of addresses) {
    await new Promise((done) => {
      addEventListener("hashchange", done, { once: true });
      location.hash = address;
    });
    const parts = [...document.querySelectorAll(".answer > :is(span, ins, del)")];
    found.push({
      prompt: text(".prompt-text"), answer: text(".answer"), words: text(".words dd"), note: text(".note"),
      parts: parts.map((part) => [part.tagName.toLowerCase(), part.textContent]),
    });
  }
  return found;
}"""
"""Go to some addresses, one after the other, and read what is there."""


def texts_at(page, states):
    return page.evaluate(EACH, [urllib.parse.urlencode(state) for state in states])


def test_what_a_model_says_is_shown_as_text_and_does_nothing(page_of):
    rows = [row(0, n, text, prompt=text, verdict=text, constructor=1.0) for n, text in enumerate(HOSTILE)]
    rows += [row(5, n, f"{text} more", prompt=text) for n, text in enumerate(HOSTILE)]
    page = page_of(rows)
    before = texts_at(page, [{"prompt": n, "step": 0} for n in range(len(HOSTILE))])
    after = texts_at(page, [{"prompt": n, "mode": "difference"} for n in range(len(HOSTILE))])
    for text, was, now in zip(HOSTILE, before, after, strict=True):
        assert was["prompt"] == was["words"] == visible(text)
        assert was["answer"] == (visible(text) or "The answer is empty.")
        assert "".join(part for kind, part in now["parts"] if kind != "del") == visible(f"{text} more")
    assert page.evaluate("window.pwned") is None
    counts = {name: page.locator(name).count() for name in ("script", "style", "iframe", "img", "main svg[onload]")}
    assert counts == {"script": 2, "style": 1, "iframe": 0, "img": 0, "main svg[onload]": 0}
    assert page.text_content("h1") == page.title() == "a <b>title</b>"
    # A mark that turns the direction, or many marks on a letter, stay inside their own line.
    go(page, prompt="13")
    heights = page.eval_on_selector_all(".item", "all => all.map(each => each.getBoundingClientRect().height)")
    assert set(heights) == {86}


def health_run(steps=12, bad=8):
    """Samples that loop from a step on, an alarm, and the health of rollouts, of which no rows are kept."""
    states = {True: "loop", False: ""}
    rows = [
        row(10 * n, prompt, f"answer {prompt} of {n}", health=states[n >= bad and prompt % 2 == 0])
        for n in range(steps)
        for prompt in range(6)
    ]
    line = f"step {10 * bad}: loop in 3 of 6 answers (50 %), before in 0 of 48 answers (0 %); since step {10 * bad}"
    alarm = {"step": 10 * bad, "state": "loop", "began": 10 * bad}
    health = [{"step": 10 * bad, "name": "inference_eval", "alarm": alarm, "line": line + HOSTILE[0]}]
    for n in range(3000):
        places = list(range(n % 5))
        health.append({"step": n, "name": "rollout", "round": {"states": {"cut": places}, "answers": [4, 4]}})
    return rows, [], [], health


BOX = "each => { const box = each.getBoundingClientRect(); return [box.left, box.width, box.top, box.height]; }"


@pytest.mark.parametrize("width", [1400, 390])
def test_a_cell_of_the_health_of_a_run_leads_to_its_answers(page_of, width):
    page = page_of(health_run(), view="health")
    page.set_viewport_size({"width": width, "height": 900})
    drawn(page)
    until(page, "document.querySelectorAll('.strip svg').length === 2")
    assert page.eval_on_selector_all(".strip-name", "all => all.map(each => each.textContent)") == ["loop", "cut"]
    assert page.eval_on_selector_all(".strip-now", "all => all.map(each => each.textContent)")[0] == "50 %"
    assert page.locator(".alarm-mark").count() == 1 and "loop in 3 of 6" in page.text_content(".told")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.eval_on_selector("#health", "each => each.scrollWidth <= each.clientWidth")
    cells = page.locator(".strip svg").nth(0).locator(".cell")
    assert cells.count() == 12
    assert (
        cells.evaluate_all("all => all.map(each => Boolean(each.getAttribute('fill-opacity')))")
        == [False] * 8 + [True] * 4
    )
    assert page.locator(".strip svg").nth(1).locator(".cell").count() == 375
    left, size, top, height = page.eval_on_selector_all(".strip svg", f"all => ({BOX})(all[0])")
    page.mouse.click(left + size * 8.5 / 12, top + height / 3)
    drawn(page)
    assert page.text_content("#step-text strong") == "step 80" and shown_prompts(page) == [
        "prompt 0",
        "prompt 2",
        "prompt 4",
    ]
    check_state(page, {"step": "80", "filter": "health:loop"})
    page.locator(".item").first.click()
    assert "loop" in page.text_content(".figures")


def conversation(*parts, reward=1.0, hostile=""):
    """A row of a rollout: a call, its result, and the answer, with a text in all of them."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"37 + 45{hostile}"}}, ensure_ascii=False)
    turns = [
        {"role": "user", "content": "What is 37 + 45?"},
        {
            "role": "assistant",
            "content": f"<think>I cannot add{hostile}.</think><tool_call>{call}</tool_call>",
            "reward": 0,
        },
        {"role": "tool", "name": f"calculator{hostile}", "content": f"82{hostile}"},
        {"role": "assistant", "content": f"It is 82{hostile}.", "reward": reward},
        *parts,
    ]
    return row(3, 0, "said", prompt="user: What is 37 + 45?", turns=turns, reward=reward, rank="best")


def test_a_conversation_is_drawn_turn_by_turn(page_of):
    unread = {"role": "assistant", "content": "<tool_call>add(1, 2)</tool_call>"}
    page = page_of(([], [], [conversation(unread, hostile=HOSTILE[2])], []))
    page.set_viewport_size({"width": 1400, "height": 900})
    drawn(page)
    assert page.evaluate("window.pwned") is None
    shown = page.eval_on_selector_all(".turn", "all => all.map(each => each.querySelector('.speaker').textContent)")
    assert shown == ["assistant0", f"tool calculator{HOSTILE[2]}", "assistant1", "assistant"]
    assert page.text_content(".figures").startswith("turns3"), "the answers of the model"
    folded = page.eval_on_selector_all(
        ".folded", "all => all.map(each => [each.open, each.querySelector('summary').textContent])"
    )
    assert folded == [
        [False, f"Reasoning, {len('I cannot add.') + len(HOSTILE[2])} characters"],
        [False, f'calculator(expression="37 + 45{HOSTILE[2]}")'],
        [False, "a call of a tool is no JSON: Expecting value: line 1 column 1 (char 0)"],
    ]
    assert not page.locator(".call .part").is_visible()
    page.click(".call summary")
    assert '"expression"' in page.locator(".call .part").inner_text()
    go(page, q="cannot add")
    assert page.locator(".reasoning mark").is_visible(), "what is searched for is not folded"
    texts = page.eval_on_selector_all(".item-answer", "all => all.map(each => each.textContent)")
    assert texts and "calculator(expression=" in texts[0] and "tool_call" not in texts[0]
    page.set_viewport_size({"width": 390, "height": 900})
    page.evaluate("document.body.dataset.pane = 'detail'")
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.eval_on_selector(".answer", "each => each.scrollWidth <= each.clientWidth")


def test_an_alarm_leads_to_its_answers_and_a_run_without_health_has_no_such_view(page_of):
    page = page_of(health_run(), view="health")
    page.click(".told button")
    drawn(page)
    assert shown_prompts(page) == ["prompt 0", "prompt 2", "prompt 4"]
    assert page.evaluate("window.pwned") is None
    page = page_of([row(0, 0, "x")], view="health")
    assert page.is_hidden("[data-view=health]") and page.is_hidden("#health") and page.is_visible("#answers")
    page.keyboard.press("v")
    page.keyboard.press("v")
    drawn(page)
    assert page.is_visible("#answers")


@pytest.mark.slow
def test_lines_of_a_megabyte_are_shown_in_part_and_whole_when_asked_for(page_of):
    page = page_of([row(0, 0, LINE), row(0, 1, WORDS), row(5, 0, LINE + "y"), row(5, 1, WORDS + "end")])
    go(page, prompt="0", step="0")
    assert page.locator(".answer .more").text_content() == "Show all 1,000,000 characters"
    assert len(page.text_content(".answer")) < 21_000
    page.click(".answer .more")
    until(page, "document.querySelector('.answer').textContent.length === 1000000")
    go(page, prompt="1", mode="difference")
    page.click(".answer .more")
    until(page, "document.querySelector('.answer').textContent.length === 1000003")
    assert parts_of(page)[-1] == ["ins", "end"]
    assert page.eval_on_selector("#list", "list => list.scrollWidth === list.clientWidth")


def test_the_policy_stops_what_is_not_the_page(reports):
    page = reports.open(reports.write([row(0, 0, "x")]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        tries = (
            "document.body.innerHTML = '<b>x</b>'",
            "const made = document.createElement('script'); made.text = 'window.pwned = 1'; document.body.append(made)",
            "document.body.setAttribute('onclick', 'window.pwned = 1'); document.body.click()",
            "setTimeout('window.pwned = 1')",
            f"new Image().src = '{url}'",
        )
        for script in tries:
            page.evaluate(f"() => {{ try {{ {script}; }} catch {{ }} }}")
        call = f"fetch('{url}', {{ signal: AbortSignal.timeout(1000) }})"
        assert page.evaluate(f"{call}.then(() => 'allowed', () => 'refused')") == "refused"
        page.wait_for_timeout(100)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    assert page.evaluate("window.pwned") is None and page.locator("main").count() == 1
    assert sum("Content Security Policy" in text for text in reports.problems) >= 3
    page.close()


def longest_common(a, b):
    """The length of the longest common subsequence, by the textbook."""
    lengths = [0] * (len(b) + 1)
    for one in a:
        diagonal = 0
        for place, other in enumerate(b, start=1):
            diagonal, lengths[place] = (
                lengths[place],
                diagonal + 1 if one == other else max(lengths[place - 1 : place + 1]),
            )
    return lengths[-1]


@pytest.mark.slow
def test_differences_lead_from_one_text_to_the_other_the_shortest_way(page_of):
    random.seed(5)
    words = ["one", "two", "-", ",", "é", "日", "本", "😀", "."]
    pairs = [("a b c", ""), ("", "a"), ("same", "same"), ("the quick brown fox", "the slow brown dog")]
    for number in range(40):
        choice = words if number % 2 else [*words, " ", "  ", "\n"]
        before = [random.choice(choice) for _ in range(random.randrange(40))]
        after = [random.choice(choice) if random.random() < 0.2 else word for word in before if random.random() < 0.9]
        pairs.append(("".join(before), "".join(after)))
    page = page_of([row(step, n, pair[place]) for n, pair in enumerate(pairs) for place, step in enumerate((0, 5))])
    found = texts_at(page, [{"prompt": n, "mode": "difference"} for n in range(len(pairs))])
    for (before, after), shown in zip(pairs, found, strict=True):
        if before == after:
            assert shown["note"] == "The same as at step 0."
            continue
        parts = shown["parts"]
        assert "".join(text for kind, text in parts if kind != "ins") == before
        assert "".join(text for kind, text in parts if kind != "del") == after
        if not re.search(r"\s", before + after):  # space between two changes counts as changed
            old, new, same = (
                re.findall(r"[日本]|[^\W日本]+|.", text)
                for text in (before, after, "\0".join(text for kind, text in parts if kind == "span"))
            )
            assert len([word for word in same if word != "\0"]) == longest_common(old, new)
    expected = [
        ["span", "the "],
        ["del", "quick"],
        ["ins", "slow"],
        ["span", " brown "],
        ["del", "fox"],
        ["ins", "dog"],
    ]
    assert found[3]["parts"] == expected
    (back,) = texts_at(page, [{"prompt": 3, "mode": "difference", "step": 0, "base": 5}])
    assert ["ins", "quick"] in back["parts"]


STEPS = [
    *[
        row(step, n, f"answer {n} at {step if n % 2 else 'all'}", reward=n * 0.1 + step * (n - 2))
        for step in (0, 10, 20)
        for n in range(5)
    ],
    row(20, 5, "apple late", reward=None, finish_reason="length"),
]


def test_a_step_that_was_traced_has_a_link_to_its_trace(reports, page_of):
    trace = reports.directory / f"{reports.count + 1}" / "run0" / "profiler/plugins/profile/steps-8-12"
    trace.mkdir(parents=True)
    (trace / "process-000.xplane.pb").touch()
    page = page_of(STEPS)
    assert page.text_content("#step-text") == "step 20 of 20"
    page.keyboard.press("ArrowLeft")
    drawn(page)
    assert page.text_content("#step-text") == "step 10 of 20 traced"
    assert page.get_attribute("#step-text a", "href") == "profiler/plugins/profile/steps-8-12"


def test_keys_move_through_steps_and_prompts(page_of):
    page = page_of(STEPS)
    press = page.keyboard.press
    assert page.text_content("#step-text") == "step 20 of 20"
    press("ArrowLeft")
    drawn(page)
    assert page.text_content("#step-text") == "step 10 of 20" and page.input_value("#step") == "1"
    assert page.text_content(".answer") == "answer 0 at all"
    press("ArrowDown")
    press("j")
    press("k")
    press("d")
    drawn(page)
    assert page.text_content(".detail-head h2") == "Prompt #1"
    assert parts_of(page) == [["span", "answer 1 at "], ["del", "0"], ["ins", "10"]]
    check_state(page, {"step": "10", "prompt": "1", "mode": "difference"})
    press("Home")
    press("ArrowLeft")
    drawn(page)
    assert page.text_content("#step-text") == "step 0 of 20" and page.is_disabled("#step-back")
    press("End")
    press("c")
    drawn(page)
    assert shown_prompts(page) == ["prompt 1", "prompt 3"]
    press("c")
    press("/")
    page.keyboard.type("APPLE")
    until(page, "document.querySelectorAll('.item').length === 1")
    assert page.text_content("#count") == "1 of 6 prompts"
    assert page.text_content(".item mark") == "apple"
    press("ArrowLeft")  # in the field, not in the steps
    press("Escape")
    press("v")
    drawn(page)
    assert page.is_visible("#curves") and page.text_content("#step-text") == "step 20 of 20"
    press("?")
    assert page.is_visible("#help")


def test_filters_and_sorts(page_of):
    page = page_of(STEPS)
    found = {}
    for name in page.eval_on_selector_all("#filter option", "all => all.map(each => each.value)"):
        page.select_option("#filter", name)
        drawn(page)
        found[name] = [int(text.split()[1]) for text in shown_prompts(page)]
    every = [0, 1, 2, 3, 4, 5]
    assert found == {
        "all": every,
        "asked": every,
        "changed": [1, 3],
        "same": [0, 2, 4],
        "up": [3, 4],
        "down": [0, 1],
        "cut": [5],
    }
    page.select_option("#filter", "all")
    page.select_option("#sort", "by:reward")
    drawn(page)
    assert shown_prompts(page) == [f"prompt {n}" for n in every]
    page.click("#direction")
    drawn(page)
    assert shown_prompts(page) == [f"prompt {n}" for n in (4, 3, 2, 1, 0, 5)]  # what has no value is last both ways
    page.select_option("#base", "0")
    page.select_option("#sort", "gain")
    drawn(page)
    assert shown_prompts(page)[:2] == ["prompt 4", "prompt 3"]
    go(page, step="10")
    assert page.locator(".item .none").text_content() == "not asked yet"


def test_a_link_wins_over_an_address_that_is_still_to_be_written(page_of):
    page = page_of(STEPS)
    page.evaluate(
        """() => {
          const { port1, port2 } = new MessageChannel();
          port1.onmessage = () => (location.hash = "step=0&prompt=2");
          document.getElementById("step-back").click();
          port2.postMessage("");  // comes before the address is written, and "hashchange" after it
          for (const end = performance.now() + 200; performance.now() < end; );
        }"""
    )
    until(page, "document.getElementById('step-text').textContent === 'step 0 of 20'", timeout_s=20)
    check_state(page, {"step": "0", "prompt": "2"})


@pytest.mark.slow
def test_an_address_leads_to_what_was_shown(page_of, reports):
    page = page_of(STEPS)
    page.select_option("#metric", "num_tokens")
    page.select_option("#base", "first")
    for text in ("answer & <b>", "answer"):
        page.fill("#search", text)
        until(page, f"new URLSearchParams(location.hash.slice(1)).get('q') === {text!r}")
    page.click(".item >> nth=3")
    page.locator("#step").fill("1")
    state = {"metric": "num_tokens", "base": "first", "q": "answer", "prompt": "3", "step": "10", "mode": "difference"}
    check_state(page, state)
    other = reports.open(page.url.removeprefix("file://").partition("#")[0], **state)
    for script in ("document.querySelector('main').textContent", "document.getElementById('search').value"):
        assert other.evaluate(script) == page.evaluate(script)
    go(
        other,
        prompt="no such",
        step="x",
        base="-1",
        mode="?",
        sort="__proto__",
        filter="constructor",
        metric="toString",
    )
    assert other.text_content("#step-text") == "step 20 of 20" and len(shown_prompts(other)) == 6
    other.close()


def test_two_runs_are_side_by_side(page_of):
    first = [row(step, n, f"say {n} {step}", reward=step) for step in (0, 10) for n in range(3)]
    second = [
        row(step, 3 - n, "say 1 10" if n == 1 else f"tell {n} {step}", prompt=f"prompt {n}", reward=2 * step)
        for step in (0, 5, 10)
        for n in range(4)
    ]
    page = page_of(first, second, base="other", mode="difference", prompt="1", step="10")
    assert page.locator(".card").count() == 2 and page.locator(".item").count() == 4
    assert page.text_content(".card.run-1 .note") == "The same as at step 10 of A."
    go(page, filter="differ")
    assert shown_prompts(page) == ["prompt 0", "prompt 2"]
    go(page, base="other", mode="difference", prompt="0")
    assert parts_of(page) == [["span", "say 0 10"]][:0] + [["del", "say"], ["ins", "tell"], ["span", " 0 10"]]
    assert page.locator(".card.run-0 .answer").text_content() == "say 0 10"
    go(page, step="5", prompt="0")
    assert page.eval_on_selector_all(
        ".card-head .muted, .card-head .older", "all => all.map(each => each.textContent)"
    ) == ["step 0", "step 5"]
    assert page.locator(".plot path.line").count() == 8  # reward and num_tokens, of two runs: mean and prompt
    go(page, prompt="0.2")  # another prompt of the other run has the number 0 too
    assert page.text_content(".card.run-0 .answer") == "Not asked in this run."


@pytest.mark.slow
def test_generations_are_beside_each_other_with_their_history(page_of):
    rows = [
        row(step, 0, f"g{g} {'new' if step > 5 else 'old'}", generation_id=g)
        for step in (0, 5, 10, 15)
        for g in range(3)
    ]
    page = page_of(rows)
    tops = page.eval_on_selector_all(".card", "all => all.map(each => each.getBoundingClientRect().top)")
    assert len(tops) == 3 and len(set(tops)) == 1
    assert page.eval_on_selector_all(".card strong", "all => all.map(each => each.textContent)") == [
        f"Sample {g}" for g in range(3)
    ]
    page.click(".block .segments button >> nth=2")
    drawn(page)
    versions = page.eval_on_selector_all(
        ".version", "all => all.map(each => [each.children[0].textContent, each.children[1].textContent])"
    )
    assert versions == [["10 – 15", "g2 oldnew"], ["0 – 5", "g2 old"]]
    page.click(".version >> nth=1 >> .when")
    drawn(page)
    assert page.text_content("#step-text") == "step 0 of 15"


@pytest.mark.slow
def test_curves_have_their_values_and_lead_to_their_steps(page_of):
    metrics = [{"step": n, "train/loss": "NaN" if n == 7 else 1 / (n + 1), "train/zero": 0} for n in range(21)]
    for step, processes in ((1, 4), (11, 2)):
        metrics[step] |= {"job/processes": processes, "job/slices": 1}
    page = page_of((STEPS, metrics), view="curves")
    assert page.text_content("#curve-list p") == "From step 11 on 2 processes, before 4 processes."
    assert page.locator(".chart").nth(1).locator(".change + .tick").text_content() == "2p"
    mark = page.locator(".chart .change").nth(1)
    assert mark.get_attribute("x1") == mark.get_attribute("x2") and float(mark.get_attribute("x1")) > 100
    assert mark.locator("title").text_content() == "2 processes, before 4 processes"
    titles = page.eval_on_selector_all(".chart-title", "all => all.map(each => each.textContent)")
    assert titles == ["reward", "loss"]
    assert (
        page.text_content(".constants") == "constant:num_tokens3"
        and page.locator(".constants").nth(1).text_content() == "constant:zero0"
    )
    assert (
        page.locator(".chart path").nth(1).get_attribute("d").count("M") == 2
    )  # the line breaks where there is no number
    box = page.locator(".chart svg").nth(1).bounding_box()
    page.mouse.move(box["x"] + 44 + (box["width"] - 54) * 0.5, box["y"] + 60)
    assert page.locator(".tip").nth(1).text_content() == "step 10value  0.0909"
    page.mouse.click(box["x"] + 44 + (box["width"] - 54) * 0.52, box["y"] + 60)
    drawn(page)
    assert page.text_content("#step-text") == "step 10 of 20"
    page.fill("#curve-search", "LOSS")
    until(page, "document.querySelectorAll('.chart').length === 1")


def test_tokens_are_coloured_by_their_log_probabilities(page_of):
    tokens = {"tokens": ["Hel", "lo", " <b>", "\x1b"], "token_logprobs": [-0.01, -2.2, "-Infinity", "NaN"]}
    page = page_of([row(0, 0, "Hello <b>\x1b", **tokens), row(0, 1, "none")], mode="logprobs")
    found = page.eval_on_selector_all(
        ".answer .token", "all => all.map(each => [each.textContent, each.className, each.title])"
    )
    assert [text for text, _, _ in found] == ["Hel", "lo", " <b>", "\\x1b"]
    assert [name.split("-")[1] for _, name, _ in found] == ["0", "2", "8", "8"]
    assert found[1][2] == "log-probability −2.2, probability 0.111"
    shades = page.eval_on_selector_all(
        ".answer .token", "all => all.map(each => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(shades)) == 3
    go(page, prompt="1", mode="logprobs")
    assert "no log-probabilities" in page.text_content(".note") and page.text_content(".answer") == "none"


@pytest.mark.slow
def test_light_dark_and_paper(page_of):
    page = page_of(STEPS)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(ground) == light  # chosen by hand
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#print section").count() == 6 and page.is_visible("#print") and not page.is_visible("main")
    assert "answer 3 at 20" in page.text_content("#print")
    assert page.pdf().startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('afterprint')); localStorage.clear()")


@pytest.mark.slow
def test_a_page_that_is_written_anew_keeps_the_reader_s_place(reports):
    place = reports.write(STEPS, reload_s=0.4)
    page = reports.open(place, prompt="3", step="10")
    assert page.text_content("#reload") == "Live"
    reports.write([*STEPS, *(row(30, n, f"newest {n}") for n in range(6))], reload_s=0.4, place=place)
    until(page, "document.getElementById('summary')?.textContent.includes('4 steps')")
    assert page.text_content(".detail-head h2") == "Prompt #3" and page.text_content("#step-text") == "step 10 of 30"
    # Whoever is at the end stays at the end. A key that is pressed while the page loads itself again reaches nobody.
    for _ in range(20):
        page.keyboard.press("End")
        page.wait_for_timeout(250)
        if page.text_content("#step-text") == "step 30 of 30":
            break
    reports.write(
        [*STEPS, *(row(step, n, f"at {step}") for step in (30, 40) for n in range(6))], reload_s=0.4, place=place
    )
    until(page, "document.getElementById('step-text')?.textContent === 'step 40 of 40'")
    assert page.text_content(".answer") == "at 40"
    page.click("#reload")
    reports.write(STEPS, reload_s=0.4, place=place)
    page.wait_for_timeout(700)
    assert page.text_content("#reload") == "Paused" and page.text_content("#step-text") == "step 40 of 40"
    page.evaluate("localStorage.clear()")
    page.close()


FRAMES = """async () => {
  const list = document.getElementById("list");
  const times = [];
  for (let frame = 0, last = performance.now(); frame < 60; frame += 1) {
    list.scrollTop += 3000;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  times.sort((a, b) => a - b);
  return { median: times[30], slow: times[57], items: document.querySelectorAll(".item").length, top: list.scrollTop };
}"""


@pytest.mark.slow
def test_ten_thousand_rows_open_in_under_two_seconds_and_scroll(page_of):
    random.seed(6)
    words = [f"word{n}" for n in range(500)]
    rows = [row(0, n, " ".join(random.choices(words, k=80)), reward=random.random()) for n in range(10_000)]
    page = page_of(rows)
    opened = page.evaluate("performance.getEntriesByName('report-shown')[0].startTime")
    frames = page.evaluate(FRAMES)
    start = page.evaluate("performance.now()")
    page.fill("#search", rows[9_000]["generated_text"][:60])
    until(page, "document.querySelectorAll('.item').length === 1")
    searched = page.evaluate("performance.now()") - start
    print(f"opened {opened:.0f} ms, frames {frames}, searched {searched:.0f} ms")
    assert opened < 2000 and frames["top"] > 150_000
    assert frames["items"] < 60 and frames["median"] < 50 and searched < 1000


def test_a_run_of_rewards_has_the_reward_of_all_answers_first_and_names_best_and_worst(page_of):
    samples = [row(step, 0, f"sample {step}", gsm8k=step / 10) for step in (0, 5, 10)]
    rollouts = [
        row(
            step,
            0,
            text,
            f"question {step}",
            generation,
            rank=rank,
            reward=reward,
            gsm8k=reward,
            num_tokens=99,
            verdict="close",
            why="because " * 9,
        )
        for step in (1, 6)
        for generation, (rank, text, reward) in enumerate((("best", "good", 1.0), ("worst", "bad", 0.0)))
    ]
    metrics = [
        {"step": step, "time/update_s": step + 1, "inference_eval/step": step, "reward/mean": step / 100}
        for step in range(11)
    ]
    page = page_of((samples, metrics, rollouts), view="curves")
    assert page.locator("#curve-list h3").all_inner_texts() == ["reward", "answers", "time"]
    text = page.locator("#curve-list").inner_text()
    assert "0.1" in text and "reward" in page.locator("#metric").input_value()
    assert "99" not in text, "the mean of best and worst answers says nothing of all"
    page.evaluate("location.hash = 'step=6&prompt=0.3'")
    until(page, "document.body.innerText.includes('worst of the rollout')")
    body = page.locator("body").inner_text()
    assert "Sample 0, best of the rollout" in body and "Sample 1, worst of the rollout" in body
    assert "question 6" in body and "prompt 0" in body, "both kinds are in one page"
    figures = page.locator(".figures").first.inner_text().split("\n")
    assert "rank" not in figures, "the title says it"
    lines = {
        name: page.locator(f".figures > div:has(dt:text-is('{name}'))").first.bounding_box()["height"]
        for name in ("finish", "verdict", "why")
    }
    assert lines["verdict"] == lines["finish"] and lines["why"] > 1.5 * lines["finish"], (
        "a word is on the line of its name"
    )
