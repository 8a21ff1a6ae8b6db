import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch_inference.prompt_store import (
    BATCH_TOKENS,
    JobShape,
    PromptStore,
    batches,
    encoded_lines,
    pending_units,
    prompts_per_batch,
    share_of,
    store_prompts,
)
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
        Prompt(id=0, text="What is 8 plus 9?", answer="sevénteen", fields={"id": "q7", "tags": [1]}),
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


@pytest.mark.nightly  # in make slow: the tests around it
def test_ten_thousand_prompts_take_little_memory():
    prompts = 10_000

    def some():
        for number in range(prompts):
            record = {"text": f"{number} " + "word " * 100, "messages": None, "answer": None, "tokens": [number] * 100}
            yield json.dumps(record).encode() + b"\n"

    def body(hosts):
        return store_prompts(hosts, some(), piece_bytes=1 << 20)

    tracemalloc.start()
    (store,) = run_threads(body, 1)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == prompts and store[prompts - 1].tokens[0] == prompts - 1
    assert current < prompts * 40, "12 bytes a prompt, with room to grow"
    assert peak < 6 << 20, "the prompts are over 10 MB"


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


shapes = st.builds(JobShape, rounds=st.integers(1, 3), prompts=st.integers(1, 40), generations=st.integers(1, 3))


@st.composite
def jobs(draw):
    shape = draw(shapes)
    lengths = np.array(draw(st.lists(st.integers(1, 50), min_size=shape.prompts, max_size=shape.prompts)))
    finished = np.array(draw(st.lists(st.booleans(), min_size=shape.units, max_size=shape.units)))
    return shape, lengths, finished


@given(jobs(), st.integers(1, 5), st.integers(1, 7))
def test_every_unit_is_done_once_whatever_the_number_of_hosts(job, hosts, size):
    shape, lengths, finished = job
    units = pending_units(shape, lengths, finished)
    shares = [share_of(units, host, hosts) for host in range(hosts)]
    assert sorted(np.concatenate(shares)) == sorted(np.flatnonzero(~finished))
    seen = []
    for share in shares:
        for batch in batches(shape, share, size):
            assert 0 < len(batch.prompts) <= size
            assert len(set(batch.prompts)) == len(batch.prompts), "a prompt has one number in a batch"
            assert [lengths[p] for p in batch.prompts] == sorted((lengths[p] for p in batch.prompts), reverse=True)
            seen += [batch.round * shape.prompts + prompt for prompt in batch.prompts]
    assert sorted(seen) == sorted(units)


@given(jobs(), st.integers(1, 5))
def test_shares_are_even_in_number_and_length(job, hosts):
    shape, lengths, finished = job
    units = pending_units(shape, lengths, finished)
    shares = [share_of(units, host, hosts) for host in range(hosts)]
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if shape.rounds == 1 and len(units):
        tokens = [lengths[share % shape.prompts].sum() for share in shares]
        assert max(tokens) - min(tokens) <= lengths.max()


@given(shapes)
def test_row_numbers_count_through_round_prompt_generation(shape):
    numbers = [
        shape.row(r, p, g) for r in range(shape.rounds) for p in range(shape.prompts) for g in range(shape.generations)
    ]
    assert numbers == list(range(shape.rows))
    assert shape.row(shape.rounds, 0, 0) is None
    assert shape.row(0, -1, 0) is None


def test_a_unit_is_finished_when_all_its_rows_are_there():
    shape = JobShape(rounds=1, prompts=2, generations=2)
    assert shape.finished(np.array([True, True, True, False])).tolist() == [True, False]


def test_batches_fill_the_slots_several_times_but_not_the_memory():
    assert prompts_per_batch(sequences=64, generations=1, max_new_tokens=64) == 256
    assert prompts_per_batch(sequences=64, generations=4, max_new_tokens=64) == 64
    assert prompts_per_batch(sequences=64, generations=3, max_new_tokens=64, cap=5) == 5
    assert prompts_per_batch(sequences=256, generations=1, max_new_tokens=4096) == BATCH_TOKENS // 4096
    assert prompts_per_batch(sequences=1024, generations=1, max_new_tokens=4096) == 1024, "a wave at least"
    assert prompts_per_batch(sequences=1, generations=8, max_new_tokens=10**7) == 1
