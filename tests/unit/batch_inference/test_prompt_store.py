import json
import tracemalloc

import pytest

from lockstep.batch_inference.prompt_store import PromptStore, encoded_lines, store_prompts
from lockstep.errors import PeerError, PromptError
from lockstep.text import Prompt, PromptFields, iter_prompts
from tests import tiny
from tests.multiprocess.harness import run_threads


def lines(prompts):
    return encoded_lines(iter(prompts), tiny.tokenizer(), max_seq_len=None, max_new_tokens=4)


def body_store(hosts, prompts, piece_bytes):
    store = store_prompts(hosts, lines(prompts) if hosts.is_leader else None, piece_bytes=piece_bytes)
    left = hosts.client.get_dir("lockstep/job")
    return store, len(left)


@pytest.mark.parametrize("piece_bytes", [1, 200, 10**6])
def test_every_host_gets_the_leaders_prompts_in_pieces(piece_bytes):
    prompts = [
        Prompt(id=0, text="What is 8 plus 9?", answer="sevénteen"),
        Prompt(id=1, messages=({"role": "user", "content": "one\ntwo\u2028"},)),
        *(Prompt(id=i, text=f"prompt {i}") for i in range(2, 9)),
    ]
    for store, _ in run_threads(body_store, 3, prompts, piece_bytes):
        assert [store[i].prompt for i in range(len(store))] == prompts
        assert [len(store[i].tokens) for i in range(len(store))] == store.lengths.tolist()
        assert store[0].tokens == tuple(tiny.tokenizer().encode("What is 8 plus 9?"))


def body_refused(hosts):
    def broken():
        yield from lines([Prompt(id=i, text=f"prompt {i}") for i in range(5)])
        raise PromptError("line 6: not JSON")

    with pytest.raises(PeerError, match="process 0: PromptError: line 6: not JSON"):
        store_prompts(hosts, broken() if hosts.is_leader else None, piece_bytes=50)


def test_a_prompt_that_cannot_be_read_ends_the_job_on_every_host():
    run_threads(body_refused, 2)


@pytest.mark.slow
def test_a_hundred_thousand_prompts_take_little_memory():
    def some():
        for number in range(100_000):
            record = {"text": f"{number} " + "word " * 100, "messages": None, "answer": None, "tokens": [number] * 100}
            yield json.dumps(record).encode() + b"\n"

    def body(hosts):
        return store_prompts(hosts, some(), piece_bytes=1 << 20)

    tracemalloc.start()
    (store,) = run_threads(body, 1)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 100_000 and store[99_999].tokens[0] == 99_999
    assert current < 4 << 20, "12 bytes a prompt, with room to grow"
    assert peak < 16 << 20, "the prompts are over 100 MB"


def test_fields_of_a_file_have_any_names(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "One?", "solution": "1"}\n\n{"chat": [{"role": "user", "content": "Two?"}]}\n')
    fields = PromptFields(prompt="question", messages="chat", answer="solution")
    first, second = iter_prompts(str(path), fields)
    assert (first.text, first.answer, second.shown) == ("One?", "1", "user: Two?")
    with pytest.raises(PromptError, match=r"data.jsonl:1: has neither 'prompt' nor 'messages'"):
        list(iter_prompts(str(path)))


def test_an_empty_store_has_no_prompts():
    assert len(PromptStore()) == 0
