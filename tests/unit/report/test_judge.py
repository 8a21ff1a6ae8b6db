"""A judge behind a server on this machine: verdicts, what fails, what is never sent or said."""

import base64
import contextlib
import re
import socket
import threading
import time
import urllib.parse

import pytest

from lockstep.errors import ConfigError
from lockstep.report import JUDGE, Judge, JudgeConfig
from lockstep.report.judge import _SHOWN, verdict_of
from lockstep.text import Prompt
from tests.clock import PATIENCE_S
from tests.http_replies import Server, serving
from tests.unit.report import made_up

KEY = "sk-never-to-be-seen"
FORM = "\n\nEnd your reply with one line of its own, where N is a number from 0 to 10:\nscore: N"


def said(text):
    return 200, {"choices": [{"message": {"content": text}}]}


def row(number, text="It is 19."):
    return made_up.row(text, prompt_id=number, prompt=f"question {number}", metrics={"length": 4.0})


def judged(server, *texts, **values):
    rows = [row(number, text) for number, text in enumerate(texts)]
    prompts = [Prompt(id=number, text=one.prompt, answer="nineteen") for number, one in enumerate(rows)]
    config = JudgeConfig(base_url=server.url, model="judge-1", **values)
    found, failures = Judge(config).judge(rows, prompts)
    return [one.metrics[JUDGE] for one in found], failures


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("lockstep.report.judge.BACKOFF_S", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def test_each_answer_gets_its_verdict_beside_its_other_metrics():
    def reply(body):
        (message,) = body["messages"]
        return said(f"score: {len(message['content'].split('ANSWER ')[1].split(FORM)[0])}.5")

    with serving(reply) as server:
        template = "{{Q}} {prompt} REFERENCE {answer} ANSWER {generated_text}"
        assert judged(server, "a", "{prompt}", "bbb", template=template) == ([1.5, 8.5, 3.5], [])
    path, headers, body = min(server.asked, key=lambda each: each[2]["messages"][0]["content"])
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert (body["model"], body["temperature"]) == ("judge-1", 0)
    assert body["messages"] == [{"role": "user", "content": "{Q} question 0 REFERENCE nineteen ANSWER a" + FORM}]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("score: 7", 7),
        ("The answer 19 is right, 8 of 10.\nScore: 8.5\n", 8.5),
        ("**Score:** 3", 3),
        ("`score: -1`", -1),
        ("score: 8\nIn short:\nscore: 8.0", 8),
        ("<think>score: 2</think>\nscore : 9", 9),
        ('{"score": 4}', 4),
        ('```json\n{"reason": "10 of 10", "score": 2.5}\n```', 2.5),
        ("score: 3\nscore: 8", None),
        ("score: 8/10", None),
        ("score: 8 out of 10", None),
        ("score: 1e2", None),
        ("score: ８", None),
        ("score: 7-8", None),
        ("score: 7,5", None),
        ("score: 1,000", None),
        ("The score: 8", None),
        ("<think>score: 2", None),
        ("score: 2</think>", None),
        ("8", None),
        ("Rating: 4 stars out of 5", None),
        ("8 of 10", None),
        ("9／10", None),
        ("9⁄10", None),
        ("8 on a scale of 10", None),
        ('{"score": "8"}', None),
        ('{"score": true}', None),
        ('{"rating": 8}', None),
        ("[8]", None),
        ("none", None),
    ],
)
def test_a_verdict_is_a_line_or_an_object_of_the_form_that_was_asked_for(reply, verdict):
    assert verdict_of(reply) == verdict


def test_a_judge_that_has_json_is_asked_for_an_object_within_the_limits():
    with serving(said('{"score": 0.5}')) as server:
        values = {"json": True, "min": -1, "max": 1, "template": "{generated_text} {min} {max}"}
        assert judged(server, "a", **values) == ([0.5], [])
    ((_, _, body),) = server.asked
    assert body["response_format"] == {"type": "json_object"}
    form = 'Reply with a JSON object alone, where N is a number from -1 to 1:\n{"score": N}'
    assert body["messages"][0]["content"] == f"a -1 1\n\n{form}"


@pytest.mark.parametrize("verdict", ["-0.5", "10.5", "100"])
def test_a_verdict_outside_its_limits_is_none_and_counted(verdict):
    def reply(body):
        return said(f"score: {verdict}" if "bad" in body["messages"][0]["content"] else "score: 10")

    with serving(reply) as server:
        values, (text,) = judged(server, "good", "bad")
    assert values == [10.0, None] and "no verdict on 1 of 2 rows" in text
    assert f"the verdict {verdict} is not between judge.min 0 and judge.max 10: 'score: {verdict}'" in text


def test_a_reply_that_was_cut_is_no_verdict():
    with serving((200, {"choices": [{"message": {"content": "score: 1"}, "finish_reason": "length"}]})) as server:
        values, (text,) = judged(server, "a")
    assert values == [None] and "the reply was cut at judge.max_tokens, 256. Raise it" in text


def test_without_a_key_none_is_sent(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving(said("score: 7")) as server:
        assert judged(server, "a") == ([7.0], [])
    assert "Authorization" not in server.asked[0][1]


@pytest.mark.parametrize("passing", [(503, {}), (429, {}), (200, b"")])
def test_what_may_pass_is_tried_again(passing):
    if passing[0] == 200:  # a connection that ends before its reply
        passing = (200, b"", {"Content-Length": "50"})
    with serving(passing, passing, said("score: 4")) as server:
        assert judged(server, "a") == ([4.0], [])
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("reply", "why", "times"),
    [
        ((401, {"error": f"the key {KEY} is wrong"}), r"HTTP 401 Unauthorized: .*the key <redacted> is wrong", 1),
        ((401, {"error": base64.b64encode(f"{KEY}.".encode()).decode()}), "HTTP 401 Unauthorized: .*<redacted>", 1),
        ((401, {"error": f"{'x' * 283}{KEY}"}), "HTTP 401 Unauthorized", 1),
        ((401, {"error": KEY.encode().hex()}), "HTTP 401 Unauthorized: .*<redacted>", 1),
        ((401, {"error": urllib.parse.quote(KEY, safe="")}), "HTTP 401 Unauthorized: .*<redacted>", 1),
        ((401, b'"' + b"".join(b"\\u%04x" % each for each in KEY.encode()) + b'"'), "HTTP 401 .*: .*<redacted>", 1),
        ((500, {}), "HTTP 500", 3),
        (
            said("I would rather not say."),
            "the reply has no line 'score: N', or several that differ: 'I would rather not say.'",
            1,
        ),
        ((200, b"<html>"), "not a chat completion: '<html>'", 1),
        ((200, {"choices": [{"message": {"content": None}}]}), "the reply has no text", 1),
        ((200, b"x" * (1 << 21)), "the reply is longer than 1048576 bytes", 1),
        ((302, b"", {"Location": "http://127.0.0.1:1/elsewhere"}), "HTTP 302", 1),
    ],
)
def test_what_fails_is_said_without_the_key_and_leaves_the_cell_empty(reply, why, times):
    with serving(reply) as server:
        values, (text,) = judged(server, "a")
    assert values == [None] and len(server.asked) == times
    assert re.search(f"no verdict on 1 of 1 rows; first on prompt 0, generation 0: .*{why}", text), text
    assert KEY not in text and KEY[:9] not in text


def test_one_answer_that_cannot_be_judged_does_not_cost_the_others():
    def reply(body):
        return said("none" if "bad" in body["messages"][0]["content"] else "score: 6")

    with serving(reply) as server:
        values, (text,) = judged(server, "good", "bad", "good")
    assert values == [6.0, None, 6.0] and "on 1 of 3 rows; first on prompt 1" in text


def test_a_judge_that_does_not_answer_costs_the_time_of_a_round_and_no_more():
    released = threading.Event()

    def never(body):
        released.wait(60)
        return said("1")

    with serving(never) as server:
        values, (text,) = judged(server, *"abcdef", max_seconds=1, timeout_s=50, concurrency=2)
        assert len(server.asked) <= 2, "the others are not even tried"
        released.set()
    assert values == [None] * 6 and "no verdict on 6 of 6 rows" in text


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WITHOUT_END = {
    "one header": (HEAD, b"x"),
    "answers to come": (b"", b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n"),
    "a body": (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "trailers": (CHUNKED + b"1\r\n \r\n0\r\n", b"A: b\r\n"),
    "an error": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1000000\r\n\r\n", b" "),
}
"""The beginnings of replies, and what a server repeats until nobody takes it any more."""


@contextlib.contextmanager
def repeating(beginning, piece):
    """A server on a socket of its own. It ends with its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(beginning)
                while True:
                    connection.sendall(piece)
                    time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the connection is still open"


@pytest.mark.parametrize("way", WITHOUT_END)
def test_a_reply_without_end_is_given_up_and_its_connection_closed(way):
    with repeating(*WITHOUT_END[way]) as url:
        judge = Judge(JudgeConfig(base_url=url, model="judge-1", timeout_s=0.3, max_seconds=90, retries=0))
        (judged_row,), (text,) = judge.judge([row(0)], [Prompt(id=0, text="a")])
    assert judged_row.metrics[JUDGE] is None and "the reply was not complete after 0.3 s" in text


def test_a_reply_that_takes_too_long_names_the_time_of_the_round_where_that_is_over():
    with repeating(*WITHOUT_END["a body"]) as url:
        judge = Judge(JudgeConfig(base_url=url, model="judge-1", max_seconds=0.3, timeout_s=60))
        _, (text,) = judge.judge([row(0)], [Prompt(id=0, text="a")])
    assert "the 0.3 s for all answers of a round are over" in text


def test_a_server_that_is_not_there():
    with Server(said("1")) as server:
        pass
    values, (text,) = judged(server, "a", retries=0)
    assert values == [None] and "no reply" in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_url": "api.example"}, "must begin with http:// or https://"),
        ({"base_url": "file:///etc/passwd"}, "must begin with http:// or https://"),
        ({"base_url": "https://user:secret@host/v1"}, "has a user, a password or a query"),
        ({"base_url": "https://host/v1?key=secret"}, "has a user, a password or a query"),
        ({"model": ""}, "model is empty"),
        ({"template": "{generated_text} {secret}"}, "has {secret}; it may have {prompt}"),
        ({"template": "{prompt}"}, r"has no \{generated_text\}"),
        ({"template": "{generated_text} {"}, "Write {{ and }} for braces"),
        ({"min": 10}, "judge.min is 10 and judge.max is 10; they must be finite, and min the lower"),
        ({"retries": -1}, "retries is -1; it must be at least 0"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be more than 0"),
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_without_showing_a_secret(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        JudgeConfig(**{"base_url": "https://host/v1", "model": "judge-1"} | values)
    assert "secret@" not in str(caught.value) and "key=secret" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 400])
def test_a_key_that_the_cut_goes_through_is_not_shown(status):
    """The text was cut first, and half of a key is not found any more."""
    with serving((status, b"x" * (_SHOWN - len(KEY) // 2) + KEY.encode())) as server:
        (failure,) = judged(server, "a")[1]
    assert "xxx" in failure and KEY[:4] not in failure
