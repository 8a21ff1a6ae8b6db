import contextlib
import gzip
import json
import re
from pathlib import Path

import pytest
import yaml

from lockstep.errors import PromptError
from lockstep.text import Prompt, PromptFields, encode, load_tokenizer, read_prompts, warn_of_texts
from lockstep.text import prompts as prompt_module

ROOT = Path(__file__).parents[3]
DEMO_TOKENIZER = ROOT / "data" / "demo" / "tokenizer"
CHAT = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "answer": "seven"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_TOKENIZER)


def test_reads_an_inline_list_of_texts_questions_and_chats():
    prompts = read_prompts(["One", {"prompt": "Two", "answer": "2"}, CHAT])
    assert [prompt.id for prompt in prompts] == [0, 1, 2]
    assert [prompt.answer for prompt in prompts] == [None, "2", "seven"]
    assert [prompt.shown for prompt in prompts] == ["One", "Two", "user: What is 3 plus 4?"]


def test_reads_text_and_jsonl_files_and_skips_empty_lines(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("One\n\nTwo ↵\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(str(text))] == ["One", "Two ↵"]
    text.write_text("One\nTwo\n", encoding="utf-8-sig")  # with a byte order mark
    assert [prompt.text for prompt in read_prompts(str(text))] == ["One", "Two"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join([json.dumps({"prompt": "One", "source": "here"}), "", json.dumps(CHAT)]))
    assert [prompt.shown for prompt in read_prompts(str(lines))] == ["One", "user: What is 3 plus 4?"]


def test_reads_a_url_through_fsspec():
    import fsspec

    with fsspec.open("memory://prompts.jsonl", "wt") as file:
        file.write('{"prompt": "One"}\n')
    assert read_prompts("memory://prompts.jsonl") == [Prompt(id=0, text="One")]


PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 plus 4?"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("item", "messages", "shown", "answer"),
    [
        ({"prompt": CHAT["messages"], "answer": 7}, CHAT["messages"], "user: What is 3 plus 4?", "7"),
        ({"prompt": "p", "answer": 0.5}, None, "p", "0.5"),
        ({"prompt": "p", "answer": 7.0}, None, "p", "7"),
        (
            {"messages": [{"role": "user", "content": PARTS}]},
            [{"role": "user", "content": "What is\n3 plus 4?"}],
            "user: What is\n3 plus 4?",
            None,
        ),
        (
            {"messages": [*CHAT["messages"], {**CALL, "name": None}, {"role": "tool", "content": "7"}]},
            [*CHAT["messages"], CALL, {"role": "tool", "content": "7"}],
            f"user: What is 3 plus 4?\nassistant: {json.dumps(CALL['tool_calls'])}\ntool: 7",
            None,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["inline", "jsonl", "ndjson", "jsonlines", "parquet"])
def test_prompts_as_people_have_them(tmp_path, item, messages, shown, answer, kind):
    source = [item]
    if kind != "inline":
        source = str(tmp_path / f"prompts.{kind}")
        if kind == "parquet":
            pytest.importorskip("pyarrow")
            from pyarrow import Table, parquet

            parquet.write_table(Table.from_pylist([item]), source)
        else:
            Path(source).write_text(json.dumps(item) + "\n", encoding="utf-8")
    (prompt,) = read_prompts(source)
    assert (prompt.shown, prompt.answer) == (shown, answer)
    assert prompt.messages == (None if messages is None else tuple(messages))


def test_the_template_describes_the_tools_of_a_prompt(tmp_path):
    tokenizer = load_tokenizer(DEMO_TOKENIZER)
    tokenizer.chat_template = "{{ tools[0].name }}: {{ messages[0].content }}"
    (tmp_path / "a.jsonl").write_text(json.dumps({**CHAT, "tools": [{"name": "add"}]}), encoding="utf-8")
    prompts = read_prompts(str(tmp_path / "a.jsonl"))
    assert tokenizer.decode(encode(tokenizer, prompts)[0]) == "add: What is 3 plus 4?"
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(PromptError, match="does not mention tools, which the chat has"):
        encode(tokenizer, prompts)


def test_a_part_that_is_no_text_is_refused_by_place():
    with pytest.raises(
        PromptError, match=r"prompts\[0\]: prompt 0 has a message with a part that is no text: .*image_url"
    ):
        read_prompts([{"messages": [{"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {}}]}]}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"prompts holds no prompts; at least 1 is needed"),
        (["One", "  "], r"prompts\[1\]: prompt 1 is empty"),
        ([{"answer": "2"}], r"prompts\[0\]: has neither 'prompt' nor 'messages' \(its fields: answer\)"),
        ([{"prompt": "One", "anwser": "2"}], r"prompts\[0\]: unknown field 'anwser'; a prompt has prompt, messages, a"),
        (
            [{"prompt": "One", "answer": [2]}],
            r"'answer' is \[2\]; it must be a text or a finite number. Put it in quotes",
        ),
        ([{"prompt": "One", "answer": float("nan")}], r"'answer' is nan; it must be .*write null where there is none"),
        ([{"prompt": ["One"]}], r"'prompt' is \['One'\]; it must be a list of {role, content}"),
        ([{"prompt": 3}], r"'prompt' is 3; it must be a text"),
        ([{"prompt": "One", **CHAT}], r"prompt 0 needs a text or chat messages, exactly one .*name a field that"),
        ([{"messages": "hello"}], r"'messages' is 'hello'; it must be a list"),
        ([{"messages": []}], r"prompt 0 has an empty list of messages"),
        (["cut \ud83d"], r"prompt 0 has half a surrogate pair, '\\ud83d', which is no character"),
        ([{"messages": [{"role": "user"}]}], r"a message needs the texts 'role' and 'content'"),
        ([3], r"prompts\[0\]: 3 is not a prompt"),
        ("Once upon a time", r"'Once upon a time', which is taken as a file and must end in .txt.*write a list"),
        ("no/such/file.txt", r"prompt file 'no/such/file.txt' does not exist. Fix the path"),
        (
            "nosuchscheme://file.txt",
            r"prompt file 'nosuchscheme://file.txt' could not be read \(ConfigError: .* has the protocol",
        ),
    ],
)
def test_wrong_sources_say_where_and_what_to_do(source, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(source)


def test_wrong_lines_of_a_file_are_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n\n{"prompt": \n')
    with pytest.raises(PromptError, match=r"prompts\.jsonl:3 is not JSON: .* column \d+.*\. Write one object"):
        read_prompts(str(path))
    path.write_text('{"prompt": "One"}\n{"prompt": " "}\n')
    with pytest.raises(PromptError, match=r"prompts\.jsonl:2: prompt 1 is empty"):
        read_prompts(str(path))
    path.write_text("\n")
    with pytest.raises(PromptError, match=r"prompts\.jsonl holds no prompts"):
        read_prompts(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(
        PromptError, match=r"prompts\.jsonl:1 is not UTF-8, it begins as UTF-16 does\. Convert the file"
    ):
        read_prompts(str(path))
    path.write_bytes(gzip.compress(b'{"prompt": "One"}\n'))
    with pytest.raises(PromptError, match=r"prompts\.jsonl:1 is not UTF-8, it begins as gzip does\. Convert the file"):
        read_prompts(str(path))


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n' + "[" * 200_000 + "\n")
    with pytest.raises(PromptError, match=r"prompts\.jsonl:2 is JSON that is nested too deeply"):
        read_prompts(str(path))


def test_a_line_that_is_too_long_is_named_and_not_read_whole(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n"' + "a" * 98 + '"\n')
    assert len(read_prompts(str(path), max_line_bytes=101)) == 2
    with pytest.raises(PromptError, match=r"prompts\.jsonl:2 has more than 100 bytes \(max_line_bytes\)\. Raise that"):
        read_prompts(str(path), max_line_bytes=100)


@pytest.mark.parametrize("line", ["1" * 5000, '{"prompt": ' + "[" * 500 + "]" * 500 + "}", '"\\ud800"'])
def test_other_hostile_lines_are_errors_of_ours(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with contextlib.suppress(PromptError):
        read_prompts(str(path))


def test_encodes_texts_with_special_tokens_and_chats_with_the_template(tokenizer):
    text, chat = encode(tokenizer, read_prompts(["What is 3 plus 4?", CHAT]))
    assert text == (tokenizer.bos_token_id, *tokenizer.encode("What is 3 plus 4?", add_special_tokens=False))
    assert tokenizer.decode(list(chat)) == "<bos><|user|>What is 3 plus 4?<|assistant|>"


def test_a_prompt_that_does_not_fit_names_itself_and_the_limits(tokenizer):
    prompts = read_prompts(["What?", "What is 1234 in words?"])
    lengths = [len(tokens) for tokens in encode(tokenizer, prompts)]
    assert len(encode(tokenizer, prompts, max_seq_len=lengths[1] + 5, max_new_tokens=5)) == 2
    with pytest.raises(PromptError) as raised:
        encode(tokenizer, prompts, max_seq_len=lengths[1] + 4, max_new_tokens=5)
    assert str(raised.value) == (
        f"prompt 1 has {lengths[1]} tokens and max_new_tokens is 5: together {lengths[1] + 5}, but max_seq_len is "
        f"{lengths[1] + 4}. Shorten the prompt to {lengths[1] - 1} tokens, or lower max_new_tokens to 4, or raise "
        f"max_seq_len to at least {lengths[1] + 5}."
    )


def test_a_chat_without_a_template_or_one_it_refuses_is_an_error():
    tokenizer = load_tokenizer(DEMO_TOKENIZER)
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(PromptError, match="prompt 0: the tokenizer's chat template refused its messages: only one"):
        encode(tokenizer, read_prompts([CHAT]))
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"prompt 0 is a chat, but the tokenizer '.*' has no chat template\. Use a"):
        encode(tokenizer, read_prompts([CHAT]))


def test_further_fields_of_a_line_are_the_prompt_s_and_names_may_be_others(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"ask": "One", "gold": "1", "id": "q7", "level": 3}\n')
    (prompt,) = read_prompts(str(path), PromptFields(prompt="ask", answer="gold"))
    assert (prompt.text, prompt.answer, prompt.fields) == ("One", "1", {"id": "q7", "level": 3})
    with pytest.raises(PromptError, match=r"neither 'prompt'.*\(its fields: ask, gold, id, level\). Set prompt_field"):
        read_prompts(str(path))


def test_texts_are_a_user_s_messages_where_the_format_is_chat(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("One\n")
    chat = PromptFields(format="chat")
    for source in (str(path), ["One"], [{"prompt": "One"}]):
        (prompt,) = read_prompts(source, chat)
        assert prompt.messages == ({"role": "user", "content": "One"},) and prompt.text is None
    assert read_prompts([CHAT], chat) == read_prompts([CHAT])
    with pytest.raises(PromptError, match="prompt 0 is empty"):
        read_prompts([" "], chat)


@pytest.mark.parametrize(
    ("prompts", "format", "warned"),
    [(["One"], None, True), (["One"], "text", False), (["One", CHAT], None, False), (["One"], "chat", False)],
)
def test_texts_alone_for_a_model_of_chats_are_warned_of_once(tokenizer, prompts, format, warned, caplog, monkeypatch):
    monkeypatch.setattr(prompt_module, "_warn_of_texts", prompt_module._warn_of_texts.__wrapped__)
    fields = PromptFields(format=format)
    assert tokenizer.chat_template
    warn_of_texts(tokenizer, read_prompts(prompts, fields), fields)
    assert ("Set prompt_format: chat" in caplog.text) is warned


@pytest.mark.parametrize(("text", "warned"), [("<bos>One", True), ("One", False)])
def test_a_second_beginning_is_warned_of(tokenizer, text, warned, caplog, monkeypatch):
    unheard = prompt_module._warn_of_two_beginnings.__wrapped__
    monkeypatch.setattr(prompt_module, "_warn_of_two_beginnings", unheard)
    encode(tokenizer, read_prompts([text]))
    assert ("the tokenizer puts another before it" in caplog.text) is warned


SHIPPED = [
    path
    for room in ("config", "examples", "src/lockstep/main")
    for path in sorted((ROOT / room).rglob("*.yaml"))
    if "prompts:" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_no_shipped_configuration_is_warned_of(path):
    block = yaml.safe_load(path.read_text(encoding="utf-8"))
    block = block.get("inference_eval", block)
    source = block["prompts"]
    if isinstance(source, str) and (ROOT / source).exists():
        source = [json.loads(line) for line in (ROOT / source).read_text(encoding="utf-8").splitlines()]
    if isinstance(source, list) and all(isinstance(prompt, str) or "messages" not in prompt for prompt in source):
        assert block.get("prompt_format") is not None
    assert isinstance(source, list) or "gs://" in source or source == "$prompts"


def test_a_prompt_that_is_too_long_is_named_with_its_length_and_its_line(tokenizer, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\n{"prompt": "short"}\n\n{"prompt": "' + "a" * 400 + '"}\n')
    prompts = read_prompts(str(file))
    tokens = len(encode(tokenizer, prompts[1:])[0])
    with pytest.raises(
        PromptError, match=rf"prompt 1 \({re.escape(str(file))}:4\) has {tokens} tokens and max_new_tokens is 8: .* 64"
    ):
        encode(tokenizer, prompts, max_seq_len=64, max_new_tokens=8)
    assert prompts[0] == Prompt(id=0, text="short"), "the place is for messages alone"
