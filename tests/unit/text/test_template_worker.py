"""Chat templates mean what they mean to transformers."""

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lockstep.text import fix_template_date
from lockstep.text.template import PROCESS
from lockstep.text.tokenize import chat_text
from tests import tiny

CHAT = [
    {"role": "system", "content": " Be <brief> & é. \n"},
    {"role": "user", "content": "2 + 2?\ud800"},
    {
        "role": "assistant",
        "content": None,
        "thinking": "Add.",
        "tool_calls": [{"function": {"name": "add", "arguments": {"b": [1.5, None], "a": "ü"}}}],
    },
    {"role": "assistant", "content": "It is 4. "},
]
TEMPLATES = {
    "lines": "{% for message in messages %}\n  {% if message.content %}\n  {{ message.role }}: {{ message.content }}\n"
    "  {% endif %}\n{% endfor %}\n",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.keys() | list }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m['role'] }}"
    "{% if loop.last %}{% break %}{% endif %},{% endfor %}",
    "generation": "{% set x = 'a' %}{% for m in messages %}{% generation %}{% set x = 'b' %}{{ m.content | trim }}"
    "{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2, ensure_ascii=True, sort_keys=True) }}"
    "{{ m.tool_calls | tojson(separators=(',', ':')) if m.tool_calls }}{% endfor %}",
    "macros": "{% macro say(m, end='.') %}<{{ m.role }}>{{ caller() if caller }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% call say(m, end='!') %}{{ m.content is string }}{% endcall %}{% endfor %}",
    "namespace": "{% set n = namespace(found=false) %}{% for m in messages if m.role == 'user' %}{% set n.found = m %}"
    "{% endfor %}{{ n.found.content[:3] }}{{ messages[-1:] | length }}{{ messages | selectattr('role', 'equalto',"
    " 'user') | list | length }}",
    "variables": "{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ documents }}|{{ add_generation_prompt }}|"
    "{{ nowhere is defined }}|{{ nowhere }}",
    "methods": "{{ messages[0].content.strip().split('<')[0].upper() }}{{ messages[0].items() | list | length }}"
    "{{ messages[3].content.rstrip() + '\\n' }}{{ '%5.1f' % 2.25 }}{{ 7 // 2 }}",
    "the year": "{{ strftime_now('%Y')[:2] }}",
}
REFUSED = {
    "raise_exception": "{{ raise_exception('no system message') }}",
    "a change of the messages": "{% set x = messages.append(1) %}",
    "a way out of the sandbox": "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}",
    "an unknown method": "{{ messages[0].content.nothing() }}",
    "another file": "{% include 'a' %}",
    "a number in a text": "{{ 'a' + 1 }}",
}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_does(name, prompt):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    chat = CHAT
    if name != "tojson":  # others write no calls, which is refused
        chat = [{key: value for key, value in message.items() if key != "tool_calls"} for message in CHAT]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    text = chat_text(tokenizer, chat, add_generation_prompt=prompt)
    assert ascii(text) == ascii(expected)  # pytest-xdist cannot send half of a surrogate pair


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_a_template_is_that_of_transformers(name):
    errors = []
    variables = {"messages": CHAT, "tools": None, "documents": None, "add_generation_prompt": False}
    for render in (
        lambda: render_jinja_template([CHAT], chat_template=REFUSED[name])[0],
        lambda: PROCESS.render(REFUSED[name], variables),
    ):
        with pytest.raises(Exception) as caught:
            render()
        errors.append(str(caught.value) or type(caught.value).__name__)
    assert errors[0] == errors[1]


@pytest.mark.parametrize("template", ["<{{ messages[-1].content }}>", "<{{ messages[-1].content | trim }}>"])
def test_the_last_message_goes_on_as_in_transformers(template):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    for text in ("It is 4.", "It is ", " \n"):
        chat = [*CHAT[:2], {"role": "assistant", "content": text}]
        expected = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert chat_text(tokenizer, chat, continue_final_message=True) == expected


def test_the_date_of_a_run_is_that_of_the_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}"
    today = datetime.date.today().strftime("%d %B %Y")
    assert chat_text(tokenizer, CHAT[:2]) in (today, datetime.date.today().strftime("%d %B %Y"))
    fix_template_date(tokenizer, lambda: "2026-11-28", lambda _, choose: choose())
    assert chat_text(tokenizer, CHAT[:2]) == "28 November 2026"
