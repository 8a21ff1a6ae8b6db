"""Where an answer begins in the tokens of a chat."""

import dataclasses
import itertools
import json
import string

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep.errors import ConfigError
from lockstep.json_text import without_nulls
from lockstep.text import Prompt, encode
from lockstep.training.data import LmDataConfig, PreferenceDataConfig
from lockstep.training.data.examples import FORMATS
from lockstep.training.data.records import BadRow, list_files, read_piece
from tests.unit.training.data import characters

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def merging():
    """Characters as tokens, but two newlines, or a newline and an "ä", are one token."""
    text = "abcdefghijklmnopqrstuvwxyz<>\nä?"
    vocab = {character: number for number, character in enumerate(text)}
    vocab |= {"\n\n": len(text), "\nä": len(text) + 1}
    model = models.BPE(vocab, [("\n", "\n"), ("\n", "ä")])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), chat_template=TEMPLATE)


def chat(answer):
    return [{"role": "user", "content": "q?"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("answer", "first", "rest"),
    [("ok", "o", "k"), ("\nok", "\n\n", "ok"), ("äk", "\nä", "k")],
    ids=["apart", "newline", "letter"],
)
def test_the_first_token_of_the_answer_is_the_one_with_its_first_character(answer, first, rest):
    tokenizer = merging()
    (((sequence),),) = FORMATS["chat"].tokenize(tokenizer, [{"messages": chat(answer)}])
    tokens = tokenizer.convert_ids_to_tokens(sequence.tokens)
    assert tokens[sequence.n_prompt] == first
    assert tokens[sequence.n_prompt + 1 :] == list(rest)
    assert "".join(tokens) == "<user>\nq?<assistant>\n" + answer


TURNS = [
    ("system", "be"), ("user", "q?"), ("assistant", "\nfirst\n"), ("user", "\nno?"),
    ("assistant", "ä"), ("assistant", "more\n"), ("user", "and?"), ("assistant", "last\n"),
]  # fmt: skip
"""A chat whose answers begin and end with characters that are merged with those around them."""


def oracle(tokens):
    """Whether each token has a character of an answer, which follows the name of the role and a newline."""
    flags = [
        flag for role, content in TURNS for flag in [False] * len(f"<{role}>\n") + [role == "assistant"] * len(content)
    ]
    ends = itertools.accumulate(map(len, tokens))
    return [any(flags[end - len(token) : end]) for token, end in zip(tokens, ends, strict=True)]


@pytest.mark.parametrize("packing", [False, True])
def test_all_answers_are_targets_token_by_token(packing, tmp_path):
    tokenizer = merging()
    messages = [{"role": role, "content": content} for role, content in TURNS]
    urls = characters.write(tmp_path / "x.jsonl", [{"messages": messages}] * 2)
    config = LmDataConfig(train_urls=urls, format="chat", packing=packing, cache_dir=str(tmp_path / "cache"))
    last = characters.columns(config.load(tokenizer, 256, 0))
    found = characters.columns(dataclasses.replace(config, train_on="all").load(tokenizer, 256, 0))
    text = "".join(f"<{role}>\n{content}" for role, content in TURNS)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert "\n\n" in tokens and "\nä" in tokens
    expected = oracle(tokens)
    whole = [expected * 2] if packing else [expected] * 2
    for row, targets in zip(found["loss_mask"], whole, strict=True):
        assert row.tolist() == targets + [False] * (256 - len(targets))
    assert (found["tokens"] == last["tokens"]).all() and (last["loss_mask"] <= found["loss_mask"]).all()
    assert found["loss_mask"].sum() > last["loss_mask"].sum() == 2 * len("last\n")


def test_a_chat_that_is_cut_keeps_the_targets_before_the_cut(tmp_path):
    messages = [{"role": role, "content": content} for role, content in TURNS]
    urls = characters.write(tmp_path / "x.jsonl", [{"messages": messages}])
    config = LmDataConfig(train_urls=urls, format="chat", train_on="all", max_seq_len=44, truncate=True)
    found = characters.columns(config.load(merging(), 256, 0))
    tokens = merging().convert_ids_to_tokens(found["tokens"][0])
    assert found["loss_mask"].tolist() == [oracle(tokens)] and found["loss_mask"].any()


def test_a_template_that_writes_earlier_answers_otherwise_is_a_bad_row():
    tokenizer = merging()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}think{% endif %}{{ m.content }}"
    )
    records = [{"messages": [*chat("ok"), *chat("yes")]}, {"messages": chat("ok")}]
    several, one = FORMATS["chat_all"].tokenize(tokenizer, records)
    assert isinstance(several, BadRow) and "up to message 2" in str(several) and "data.train_on: last" in str(several)
    assert one == FORMATS["chat"].tokenize(tokenizer, records)[1]


def test_all_answers_of_a_tokenizer_without_offsets():
    (found,) = FORMATS["chat_all"].tokenize(Slow(), [{"messages": [*chat("ok"), *chat("yes")]}])
    ((sequence),) = found
    masked = "".join(chr(token) if token >= 0 else "." for token in sequence.tokens)
    assert sequence.n_prompt == len("<user>\nq?<assistant>\n")
    assert masked[sequence.n_prompt :] == "ok" + "." * len("<user>\nq?<assistant>\n") + "yes"


def test_all_answers_need_chats():
    with pytest.raises(ConfigError, match=r"data\.train_on is all and data\.format is text"):
        LmDataConfig(train_on="all")


def ending(text):
    """A tokenizer that ends what it encodes with a token of its own, and knows that as a special token in texts too."""
    tokenizer = merging()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    end = tokenizer.eos_token_id
    if text:
        pair = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
        tokenizer.backend_tokenizer.post_processor = pair
    return tokenizer, end


@pytest.mark.parametrize("itself", [False, True])
def test_a_text_ends_with_one_end_of_sequence_token(itself):
    tokenizer, end = ending(itself)
    for (found,) in FORMATS["text"].tokenize(tokenizer, [{"text": "ab"}, {"text": "ab</s>"}])[: 1 if itself else 2]:
        assert found.tokens == [0, 1, end]
    records = [{"prompt": "a", "completion": each} for each in ("b", "b</s>", "")]
    targets = [one.tokens[one.n_prompt :] for (one,) in FORMATS["prompt_completion"].tokenize(tokenizer, records)]
    assert targets == [[1, end], [1, end], [end]]


def test_pairs_find_the_boundary_of_each_side(tmp_path):
    records = [{"chosen": chat("\nok"), "rejected": chat("no")}]
    config = PreferenceDataConfig(train_urls=characters.write(tmp_path / "x.jsonl", records))
    found = characters.columns(config.load(merging(), 32, 0))
    assert found["loss_mask"].sum(-1).tolist() == [[3, 2]]  # the newlines, o, k; n, o


class Slow(characters.Tokenizer):
    """Merges a newline with the one after it, and does not say which characters a token holds."""

    def encode(self, text, add_special_tokens=True):
        return [ord(one) for one in text.replace("\n\n", "\x04")]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        turns = "".join(f"<{m['role']}>\n{m['content']}" for m in messages)
        return turns + ("<assistant>\n" if add_generation_prompt else "")


def test_a_slow_tokenizer_works_until_a_token_is_merged():
    good, merged = FORMATS["chat"].tokenize(Slow(), [{"messages": chat("ok")}, {"messages": chat("\nok")}])
    assert good[0].n_prompt == len("<user>\nq?<assistant>\n")
    assert isinstance(merged, BadRow) and "Use its fast version" in str(merged)
    sides = {"chosen": chat("ok"), "rejected": chat("ok")}
    pairs = FORMATS["preference"].tokenize(Slow(), [sides | {side: chat("\nok")} for side in sides])
    assert [str(each).replace(str(merged), "") for each in pairs] == ["(chosen) ", "(rejected) "]


def test_a_template_that_changes_the_prompt_is_a_bad_row():
    class Thinks(characters.Tokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
            return super().apply_chat_template(messages, tokenize) + ("|think" if add_generation_prompt else "")

    (found,) = FORMATS["chat"].tokenize(Thinks(), [{"messages": chat("ok")}])
    assert "does not begin with that of its prompt" in str(found)


def test_a_chat_that_the_template_refuses_is_a_bad_row():
    class Strict(characters.Tokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
            raise KeyError("roles must alternate")

    (found,) = FORMATS["chat"].tokenize(Strict(), [{"messages": chat("ok")}])
    assert isinstance(found, BadRow) and "template refuses: 'roles must alternate'" in str(found)


def test_chats_need_a_template(tmp_path):
    class Plain(characters.Tokenizer):
        chat_template = None

    with pytest.raises(ConfigError, match="'./characters' has no chat template"):
        LmDataConfig(train_urls=("x.jsonl",), format="chat").load(Plain(), 16, 0)
    FORMATS["prompt_completion"].check(Plain())


def test_a_completion_has_no_space_that_the_tokenizer_puts_before_texts():
    """As those of Llama 2 and Mistral do."""
    vocab = {character: number for number, character in enumerate("\n\u2581q2+=4")}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    records = [{"prompt": "q 2+2=", "completion": "4"}, {"prompt": "q 2+2=", "completion": " 4"}]
    for ((one,),), record in zip(zip(FORMATS["prompt_completion"].tokenize(tokenizer, records)), records, strict=True):
        assert one.tokens == tokenizer.encode(record["prompt"] + record["completion"])
        assert one.n_prompt == len(tokenizer.encode(record["prompt"]))


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("text", {"text": "cut \ud83d"}),
        ("prompt_completion", {"prompt": "a", "completion": "cut \ud83d"}),
        ("chat", {"messages": [{"role": "user", "content": "cut \ud83d"}, {"role": "assistant", "content": "a"}]}),
        ("chat", {"messages": ["q", {"role": "assistant", "content": "a"}]}),
        ("chat_all", {"messages": [None, {"role": "assistant", "content": "a"}]}),
    ],
)
def test_what_no_tokenizer_takes_is_a_bad_row(kind, record):
    (found,) = FORMATS[kind].tokenize(merging(), [record])
    assert isinstance(found, BadRow) and ("surrogate" in str(found) or "a message needs the texts" in str(found))


CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": [{"c": 1}, {"d": None}]}}}
FULL = [
    {"role": "system", "content": "be", "name": "owner"},
    {"role": "user", "content": "q?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "ok", "tool_call_id": "id"},
    {"role": "assistant", "content": "sum", "thinking": "long"},
]
EVERY_KEY = (
    "{% for m in messages %}<{% for key in m | sort %}{{ key }}={{ m[key] | tojson }};{% endfor %}>"
    "{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)
"""A template that shows each key, as many do with ``name`` and the arguments of a call. transformers 5.24 takes away
``content`` where it is null."""


def written(path, records, kind):
    """A file of records: JSON lines as the author wrote them or as `datasets` does, with all keys; a table."""
    table = pyarrow.Table.from_pylist(records)
    if kind.endswith("jsonl"):
        rows = table.to_pylist() if kind == "datasets.jsonl" else records
        (path / kind).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind.endswith("parquet"):
        pyarrow.parquet.write_table(table, path / kind)
    else:
        with pyarrow.OSFile(str(path / kind), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path / kind


@pytest.mark.parametrize("kind", ["x.jsonl", "datasets.jsonl", "x.parquet", "x.arrow"])
@pytest.mark.parametrize("data_format", ["chat", "chat_all", "preference"])
def test_a_chat_has_the_keys_that_its_author_wrote_in_every_kind_of_file(tmp_path, kind, data_format):
    """A column of objects has each key of any of them, with nulls."""
    answers = [[*FULL[:5], FULL[-1] | {"content": text}] for text in ("sum", "other")]
    names = ("chosen", "rejected") if data_format == "preference" else ("messages",)
    few = {name: [{"role": "user", "content": "q?"}, {"role": "assistant", "content": name}] for name in names}
    record = dict(zip(names, answers, strict=False))
    tokenizer = merging()
    tokenizer.chat_template = EVERY_KEY
    (file,) = list_files(str(written(tmp_path, [record, few], kind)), "data")
    records = [record for _, _, record in read_piece(file, 0, 1, ())]
    texts = []
    tokenizer.add_tokens(list(dict.fromkeys(string.printable)))
    for example in FORMATS[data_format].tokenize(tokenizer, records):
        assert not isinstance(example, BadRow), example
        texts += ["".join(tokenizer.convert_ids_to_tokens([i if i >= 0 else ~i for i in s.tokens])) for s in example]
    expected = [chat for row in (record, few) for chat in row.values()]
    for chat in expected:
        written_keys = [without_nulls(message) | {"content": message["content"]} for message in chat]
        assert texts.pop(0) == tokenizer.apply_chat_template(written_keys, tokenize=False)
    assert "name" not in tokenizer.apply_chat_template(expected[-1], tokenize=False)


def of_words(post_processor, template=None, eos="</s>"):
    """Characters as tokens, <s> is 0 and </s> is 1, with what the tokenizer puts around a text."""
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *"abq? \n<>urse"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=post_processor, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, bos_token="<s>", eos_token=eos)


@pytest.mark.parametrize(
    ("around", "before"), [("$A </s>", []), ("<s> $A </s>", [0]), ("<s> $A", [0]), ("$A", []), ("$A </s> </s>", [])]
)
def test_an_end_that_the_tokenizer_appends_is_not_between_prompt_and_answer(around, before):
    tokenizer = of_words(around)
    plain = {text: tokenizer.encode(text, add_special_tokens=False) for text in ("q?", "ab", "q?</s>")}
    record = {"prompt": "q?", "completion": "ab"}
    (((sequence),),) = FORMATS["prompt_completion"].tokenize(tokenizer, [record])
    assert list(sequence.tokens) == [*before, *plain["q?"], *plain["ab"], 1]
    assert sequence.n_prompt == len(before) + 2
    prompts = [Prompt(id=0, text="q?"), Prompt(id=1, text="q?</s>")]
    assert encode(tokenizer, prompts) == [(*before, *plain["q?"]), (*before, *plain["q?</s>"])], "written is written"
    (((document),),) = FORMATS["text"].tokenize(tokenizer, [{"text": "ab"}])
    assert [*document.tokens][: len(before) + 3] == [*before, *plain["ab"], 1]


PAIR = {"chosen": chat("ok"), "rejected": chat("no")}


def test_a_pair_may_have_its_prompt_beside_the_answers():
    apart = {"prompt": chat("ok")[:1], "chosen": chat("ok")[1:], "rejected": chat("no")[1:]}
    records = [PAIR, apart, {**PAIR, "prompt": "q?"}, {**PAIR, "prompt": chat("ok")[:1]}]
    first, *rest = FORMATS["preference"].tokenize(merging(), records)
    assert not isinstance(first, BadRow) and rest == [first] * 3


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"chosen": "ok"}, "has 'ok' as 'chosen'; it must be a list of messages. Correct it, or set data.format"),
        ({"chosen": chat("ok")[1:]}, "(chosen) has 1 messages and ends with role 'assistant'; it must have a prompt"),
        ({"rejected": [*chat("no"), *chat("no")[:1]]}, "(rejected) has 3 messages and ends with role 'user'"),
        ({"rejected": [{"from": "human"}, {"from": "gpt", "value": "no"}]}, "(rejected) has ['from', 'value'] as its"),
        ({"rejected": [*chat("a"), *chat("no")]}, "'rejected' that differ before the last message"),
    ],
)
def test_a_pair_that_cannot_be_used_says_what_it_has(values, text):
    (bad,) = FORMATS["preference"].tokenize(merging(), [{**PAIR, **values}])
    assert isinstance(bad, BadRow) and text in str(bad)


@pytest.mark.parametrize("kind", ["chat", "prompt_completion"])
def test_an_unpaired_answer_is_tokenised_as_without_a_label(kind):
    tokenizer = merging() if kind == "chat" else characters.Tokenizer()
    if kind == "chat":
        plain = [{"messages": chat(answer)} for answer in ("ok", "\nok", "no")]
        records = [{"prompt": each["messages"][:-1], "completion": each["messages"][-1:]} for each in plain]
    else:
        plain = records = [{"prompt": "q?", "completion": answer} for answer in ("ok", "a", "no")]
    labels = [True, False, True]
    records = [{**record, "label": label} for record, label in zip(records, labels, strict=True)]
    found = FORMATS["unpaired_preference"].tokenize(tokenizer, records)
    expected = FORMATS[kind].tokenize(tokenizer, plain)
    assert [one.value for (one,) in found] == [1.0, 0.0, 1.0]
    assert [(one.n_prompt, one.tokens) for (one,) in found] == [(one.n_prompt, one.tokens) for (one,) in expected]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"label": 1}, "has 1 as 'label'; it must be true or false"),
        ({"completion": chat("ok")[1:]}, "that do not go together; both must be texts, or"),
        ({"prompt": chat("ok")[:1], "completion": chat("ok")}, "that do not go together"),
        ({"prompt": 3}, "has 3 as 'prompt'; it must be a text or a list of messages"),
        ({"completion": ""}, "has a completion of 0 tokens"),
    ],
)
def test_an_unpaired_answer_that_cannot_be_used_is_a_bad_row_between_good_ones(values, text):
    good = {"prompt": "q?", "completion": "a", "label": True}
    first, bad, last = FORMATS["unpaired_preference"].tokenize(merging(), [good, {**good, **values}, good])
    assert isinstance(bad, BadRow) and text in str(bad)
    assert first == last and not isinstance(first, BadRow)


def test_labels_are_a_column(tmp_path):
    records = [{"prompt": "q?", "completion": answer, "label": answer == "a"} for answer in ("a", "b", "a")]
    urls = characters.write(tmp_path / "x.jsonl", records)
    config = PreferenceDataConfig(
        train_urls=urls, format="unpaired_preference", max_seq_len=8, shuffle=False, cache_dir=str(tmp_path / "cache")
    )
    rows = config.load(characters.Tokenizer(), 8, 0)
    cached = characters.columns(rows)
    assert cached["desirable"].tolist() == [True, False, True]
    assert [example[0].value for _, example in rows.examples(9)] == [1.0, 0.0, 1.0]
    columns = config.columns(8)
    assert {name: (column.shape, column.dtype) for name, column in columns.items()} == {
        name: (column.shape[1:], column.dtype) for name, column in cached.items()
    }
