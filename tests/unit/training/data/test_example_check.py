"""What is wrong with the tokens and masks of examples is counted and named, and what can never end is refused."""

import io
import itertools
import json
import logging

import numpy as np
import pytest
from rich.console import Console

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.testing import run_threads
from lockstep.text import stop_ids
from lockstep.training import TrainLmConfig, train
from lockstep.training.data import GrpoDataConfig, LmDataConfig, PreferenceDataConfig, example_check
from lockstep.training.data.example_check import ExampleCheck, check_examples, print_examples
from lockstep.training.data.examples import DataFormat, TokenSequence
from lockstep.training.rl import load_questions
from tests import tiny

BOS, EOS = 1, 2
OWN_STOP = ["--inference_eval.prompts", "[a]", "--inference_eval.stop_token_ids", "[{dot}]"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENING = TEMPLATE.replace("'|>' + m", "('|><think>' if m.role == 'assistant' else '|>') + m")
OPENING = OPENING.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
ENDLESS = TEMPLATE.replace("{{ eos_token }}", ".")


def tokenizer(template=TEMPLATE):
    made = tiny.tokenizer()
    made.chat_template = template
    return made


def chat(answer, question="2 plus 2?"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def checked(examples, kind="answers", **options):
    check = ExampleCheck(tokenizer(), [EOS], kind=kind, **options)
    for number, example in enumerate(examples):
        check.add(f"row {number}", example)
    return check


def of_chats(template, answers, name="chat"):
    """The check of chats, one for each answer."""
    made = tokenizer(template)
    check = ExampleCheck(made, [EOS], kind="answers")
    records = [{"messages": chat(answer, f"{number}?")} for number, answer in enumerate(answers)]
    for number, example in enumerate(DataFormat.find(name).tokenize(made, records)):
        check.add(f"line {number}", example)
    return check


def one(n_prompt, tokens):
    return (TokenSequence(n_prompt, tokens),)


@pytest.mark.parametrize(
    ("template", "answers", "counts"),
    [
        (TEMPLATE, ["four", "five"], {}),
        (ENDLESS, ["four", "five"], {"no end": 2}),
        ("{{ bos_token }}" + TEMPLATE, ["four"], {"two BOS": 1}),
        (TEMPLATE, ["<think>2 + 2</think>four", "<think>four", "four</think>", "[THINK]a[/THINK]b"], {"thought": 2}),
        (TEMPLATE, ["<think>four[/THINK]"], {"thought": 1}),
        (OPENING, ["2 + 2</think>four", "four", "<think>2 + 2</think>four"], {"thought": 2}),
        (OPENING.replace("<think>", "<|start_think|>"), ["2 + 2</think>four"], {"thought": 1}),
    ],
    ids=["healthy", "endless", "two BOS", "thoughts", "two families", "opened by the template", "wrong token"],
)
def test_what_is_wrong_with_the_tokens_of_chats_is_counted(template, answers, counts):
    check = of_chats(template, answers)
    assert check.counts == counts and len(check.problems()) == len(counts)
    for line in check.problems():
        share = f"{next(iter(counts.values()))} of {len(answers)} examples ("
        assert share in line and "The first: line " in line


def test_each_answer_of_a_chat_needs_its_end():
    template = TEMPLATE.replace("m.role == 'assistant'", "loop.last and m.role == 'assistant'")
    for made, counts in ((tokenizer(), {}), (tokenizer(template), {"no end": 1})):
        check = ExampleCheck(made, [EOS], kind="answers")
        first = made("<|user|>a<|assistant|>b", add_special_tokens=False)["input_ids"]
        tokens = [*first, *([EOS] if not counts else []), *(~token for token in (3, 40, 4)), 41, EOS]
        check.add("row 0", one(len(first) - 1, tokens))
        assert check.counts == counts and check.no_end() is None


def test_masks_that_leave_out_what_ends_an_answer_are_named():
    check = checked([one(2, [BOS, 9, 10, 11, ~EOS]), one(2, [BOS, 9, 12, 11, ~EOS])])
    wrong = check.no_end()
    assert check.counts == {"no end": 2}
    assert "none of the 2 examples looked at has a target at which generation stops (<eos> (2))" in wrong
    assert "2 answers have one behind them that the loss mask leaves out" in wrong
    assert f"2 answers end with {tokenizer().convert_ids_to_tokens(11)} (11)" in wrong
    assert "data.require_end_token: false" in wrong


def test_empty_masks_duplicates_and_cut_examples():
    examples = [one(2, [BOS, 9, 10, EOS])] * 3 + [one(2, [BOS, 9, ~10]), one(1, [BOS, 9, 10, 11, 12])]
    check = checked(examples, length=5)
    assert check.counts == {"duplicate": 2, "no target": 1, "cut": 1}
    (cut,) = [line for line in check.problems() if "are cut" in line]
    assert "1 of 5 examples (20.0%) are cut, as they are longer than 5 tokens" in cut and "row 4" in cut
    # The same tokens with another mask, or divided into a pair otherwise, are another example.
    first, other = (TokenSequence(1, [BOS, 9, 10, EOS]), TokenSequence(2, [BOS, 9, 10, EOS]))
    assert checked([(first,), (other,), (first, other), (other, first)]).counts == {}


def test_empty_answers_equal_pairs_and_labels_of_one_kind():
    empty, answer = one(2, [BOS, 9, EOS]), one(2, [BOS, 9, 10, EOS])
    check = checked([empty, (*answer, *empty), (*answer, *answer)])
    assert check.counts == {"no text": 2, "no difference": 1}
    assert [line.partition(")")[2] for line in check.problems()] == [
        " have an empty answer or text: only its end is trained. The first: row 0, …%",
        " are pairs of two equal answers, which show no preference. The first: row 2, …%&",
    ]
    # A document that is cut may leave its end to the next row.
    documents = [one(0, [BOS, EOS]), one(0, [EOS]), one(0, [BOS, 9, EOS])]
    assert checked(documents, "documents").counts == {"no text": 1}
    labels = [(TokenSequence(2, [BOS, 9, token, EOS], label),) for token, label in ((10, 0.0), (11, 0.0), (12, 1.0))]
    (alone,) = checked(labels[:2]).problems()
    assert alone.startswith("training data: all 2 examples have the label false: without the other one")
    assert checked(labels).problems() == []


def test_an_example_that_just_fits_is_not_cut():
    assert checked([one(1, [BOS, 9, 10, 11, EOS])], length=5).counts == {}
    wrong = checked([one(1, [BOS, 9, 10, 11, 12])], length=5).no_end()
    assert wrong.endswith("all are cut at 5 tokens. Raise data.max_seq_len.")


def test_where_bos_and_end_are_one_token_a_turn_may_begin_after_the_end_of_another():
    check = ExampleCheck(tokenizer(), [BOS], kind="answers")
    check.add("row 0", one(2, [BOS, 9, 10, BOS, BOS, 9, 10, BOS]))
    assert check.counts == {}
    check.add("row 1", one(2, [BOS, BOS, 9, 10, BOS]))
    assert check.counts == {"two BOS": 1}


def test_documents_and_questions_have_no_answer_that_must_end():
    check = checked([one(0, [9, 10, 11]), one(0, [BOS, BOS, 12])], "documents")
    assert check.counts == {"two BOS": 1} and check.no_end() is None
    assert check.summary("2 rows").endswith("examples of 2 rows; the end of documents: <eos> (2)")
    questions = load_questions(
        GrpoDataConfig(train_urls=("data/grpo/sums.jsonl",), format="text"),
        tokenizer(),
        row_length=32,
        max_new_tokens=8,
        seed=0,
    )
    check = checked([example for _, example in questions.examples(1000)], "questions")
    assert check.examples == 64 and check.counts == {} and check.no_end() is None


@pytest.mark.parametrize(("count", "rows"), [(10_000, "all"), (64, "first")])
def test_a_bounded_number_of_rows_is_read_none_of_them_twice(count, rows, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"messages": chat(f"{n}")}) + "\n" for n in range(200)))
    config = LmDataConfig(train_urls=(str(path),), format="chat", length_buckets=(30,), cache_dir=str(tmp_path / "c"))
    data = config.load(tokenizer(), 64, 0)
    found = list(data.examples(count))
    texts = [str(example[0].tokens.tolist()) for _, example in found]
    assert len(set(texts)) == len(texts) == (200 if rows == "all" else 64)
    trained = [str(row[row > 0].tolist()) for step in range(2) for row in data.batch(step, 32, slice(32))["tokens"]]
    assert set(trained) <= set(texts)


def test_pairs_and_packed_rows_are_looked_at_example_by_example(tmp_path):
    pairs = PreferenceDataConfig(train_urls=("data/preferences/sums.jsonl",), cache_dir=str(tmp_path))
    examples = [example for _, example in pairs.load(tokenizer(), 32, 0).examples(1000)]
    assert len(examples) == 400 and {len(example) for example in examples} == {2}
    few = tmp_path / "few.jsonl"
    with open("data/demo/train.jsonl", encoding="utf-8") as stream:
        few.write_text("".join(itertools.islice(stream, 400)))
    packed = LmDataConfig(train_urls=(str(few),), format="prompt_completion", packing=True, cache_dir=str(tmp_path))
    examples = [example for _, example in packed.load(tokenizer(), 64, 0).examples(100)]
    assert len(examples) == 400 and checked(examples).counts == {}


def shown(check, **console):
    stream = io.StringIO()
    print_examples(check, Console(file=stream, width=40, **console))
    return stream.getvalue()


def test_five_examples_are_drawn_and_their_masks_shown_in_colour_or_by_marks(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    records = [{"messages": chat("four\n<think>", f"{number}?")} for number in range(50)]
    examples = DataFormat.find("chat").tokenize(tokenizer(), records)
    plain = shown(checked(examples))
    lines = plain.splitlines()
    assert len(lines) == 6 and "between ⟦ and ⟧" in lines[0]
    assert all(line.endswith("?<|assistant|>⟦four↵<think><eos>⟧") and "\x1b" not in line for line in lines[1:])
    assert shown(checked(examples)) == plain != shown(checked(examples, seed=1)), "drawn by the seed"
    terminal = {"force_terminal": True, "color_system": "standard"}
    coloured = shown(checked(examples), **terminal)
    assert "⟦" not in coloured and "\x1b[32mfour↵<think>\x1b[0m\x1b[1;7;32m<eos>" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦four↵<think><eos>⟧" in shown(checked(examples), **terminal)


def test_long_examples_are_shortened_and_nothing_reaches_a_terminal_raw():
    text = tokenizer()("a\x1b[31m" + "b " * 500)["input_ids"]
    line = shown(checked([one(len(text), [*text, *text, EOS])])).splitlines()[1]
    assert len(line) < 600 and " characters) …" in line and line.endswith("<eos>⟧") and "\x1b" not in line


def run_config(tmp_path, *keys, template=ENDLESS):
    """A configuration of chats with a template."""
    tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"messages": chat(f"{n}")}) + "\n" for n in range(20)))
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--model.type", "llama", "--model.max_seq_len", "64"]
    words += ["--data.train_urls", f"[{path}]", "--data.cache_dir", str(tmp_path / "cache")]
    return parse_arguments(TrainLmConfig, [*words, "--trainer.log_dir", str(tmp_path / "runs"), *keys])


def test_a_run_that_never_trains_an_end_is_refused_by_all_hosts_before_it_has_a_directory(tmp_path):
    config = run_config(tmp_path, "--data.format", "chat")
    tiny.tokenizer()  # transformers is not imported by several threads at once

    def refused(hosts):
        with pytest.raises(PeerError, match="none of the 20 examples looked at has a target at which") as caught:
            train(config, hosts)
        return str(caught.value)

    first, *others = run_threads(refused, 3)
    assert others == [first] * 2 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("keys", "template", "said"),
    [
        (["--data.format", "chat", "--data.require_end_token", "false"], ENDLESS, "learn to go on for ever"),
        (["--data.format", "chat"], TEMPLATE, "looked at 20 examples of 20 rows"),
        (["--data.format", "chat", *OWN_STOP], ENDLESS, "the end of answers: . ("),
    ],
    ids=["allowed", "healthy", "own stop token"],
)
def test_a_run_says_what_it_has_looked_at(keys, template, said, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    dot = tokenizer().convert_tokens_to_ids(".")
    config = run_config(tmp_path, *(key.format(dot=dot) for key in keys), template=template)
    made = tokenizer(template)
    ends = config.inference_eval.sampling_params(stop_ids(made)).stop_token_ids
    rows = config.data.load(made, 64, 0)
    check_examples(config.data, rows, made, ends, length=64, seed=0, hosts=Hosts(MemoryClient.hub(1)[0]))
    assert said in caplog.text and capsys.readouterr().out.count("⟦") == 6


def test_a_longer_row_means_that_fewer_are_looked_at(monkeypatch):
    counts = []

    class Rows:
        def __len__(self):
            return 10**9

        def examples(self, count):
            counts.append(count)
            return iter([("row 0", one(1, np.array([BOS, 9, EOS])))])

    monkeypatch.setattr(example_check, "print_examples", lambda *_: None)
    for length in (16, 4096, 131_072):
        config = LmDataConfig(format="chat")
        hosts = Hosts(MemoryClient.hub(1)[0])
        check_examples(config, Rows(), tokenizer(), [EOS], length=length, seed=0, hosts=hosts)
    assert counts == [1000, 256, 32]


def test_what_has_no_effect_is_refused():
    with pytest.raises(ConfigError, match="data.require_end_token is false, and documents have no answers"):
        LmDataConfig(require_end_token=False)
    with pytest.raises(ConfigError, match="data.require_end_token is False, which has no effect in train-grpo"):
        GrpoDataConfig(require_end_token=False)
