"""The process that renders chat templates: what it may take, and that nothing of one template reaches the next."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.errors import PromptError
from lockstep.text import template as template_module
from lockstep.text.template import TemplateProcess
from lockstep.text.tokenize import chat_text
from tests import tiny
from tests.clock import PATIENCE_S, until

FIRST = "{{ messages[0].content }}"


def variables(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process.close()


MUCH = {
    "a product": "{{ 'x' * 10**10 }}",
    "a list": "{{ (1,) * 10**10 }}",
    "a filter": "{{ 'a' | center(10**11) }}",
    "a loop": "{% set n = namespace(x='a') %}{% for _ in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
}


@pytest.mark.parametrize("way", MUCH)
def test_a_template_that_needs_all_memory_is_refused_and_the_next_is_rendered(process, monkeypatch, way):
    monkeypatch.setattr(template_module, "TEMPLATE_BYTES", 256 << 20)
    with pytest.raises(PromptError, match="268,435,456 bytes of memory"):
        process.render(MUCH[way], variables("a"))
    assert process.render(FIRST, variables("b")) == "b"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",  # one instruction of Python, which nothing can interrupt
    ],
)
def test_a_template_that_never_ends_is_ended(process, monkeypatch, source):
    process.render(FIRST, variables("a"))
    with monkeypatch.context() as patch:
        patch.setattr(template_module, "TEMPLATE_S", 0.2)
        with pytest.raises(PromptError, match=r"it has not ended after 0\.2 s"):
            process.render(source, variables("a"))
    assert process.render(FIRST, variables("b")) == "b"


def test_a_text_without_end_is_refused(process, monkeypatch):
    monkeypatch.setattr(template_module, "LINE_BYTES", 1000)
    with pytest.raises(PromptError, match="its text has 1,001 characters; at most 1,000 are possible"):
        process.render("{{ 'x' * 1001 }}", {})


def test_the_error_of_a_template_is_said(process):
    for source, text in (("{{ raise_exception('only one') }}", "only one"), ("{% if %}", "Expected an expression")):
        with pytest.raises(PromptError, match=text):
            process.render(source, {})


def test_its_process_has_no_secret_and_ends_with_this_one(process, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_never_to_be_seen")
    own = TemplateProcess()
    try:
        own.render(FIRST, variables("a"))
        worker = own._process
        facts = Path(f"/proc/{worker.pid}")
        assert b"hf_never_to_be_seen" not in (facts / "environ").read_bytes()
        limits = (facts / "limits").read_text(encoding="utf-8")
        assert not any(line.startswith("Max cpu time  ") and "unlimited  " in line[:40] for line in limits.splitlines())
        worker.stdin.close()  # as where this process is killed
        assert worker.wait(60) == 0
    finally:
        own.close()


def test_an_interrupted_template_is_not_taken_for_the_next(monkeypatch):
    own = TemplateProcess()
    monkeypatch.setattr(template_module, "TEMPLATE_S", 60.0)
    try:
        own.render(FIRST, variables("a"))
        stat, main = Path(f"/proc/{own._process.pid}/stat"), threading.main_thread().ident

        def interrupt():
            until(lambda: stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "R")
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            own.render("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}late", {})
        thread.join()
        assert own.render(FIRST, variables("b")) == "b"
    finally:
        own.close()


FORK = """
import os
from lockstep.text.template import PROCESS
assert PROCESS.render("{{ x }}", {"x": 1}) == "1"
own = PROCESS._process.pid
child = os.fork()
text = PROCESS.render("{{ x }}", {"x": child})
assert text == str(child) and (PROCESS._process.pid == own) == bool(child)
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert PROCESS.render("{{ x }}", {"x": 2}) == "2"
"""


def test_a_fork_has_a_process_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE_S)


def test_threads_wait_for_each_other(process):
    texts = {}

    def ask(number):
        texts[number] = [process.render(FIRST, variables(f"{number}-{turn}")) for turn in range(30)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [f"{number}-{turn}" for turn in range(30)] for number in range(4)}


def test_a_tokenizer_has_the_limits():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ 'x' * 10**10 }}"
    with pytest.raises(PromptError, match="it needs more than 1,073,741,824 bytes of memory"):
        chat_text(tokenizer, [{"role": "user", "content": "a"}])
