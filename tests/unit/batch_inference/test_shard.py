import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch_inference.shard import BATCH_TOKENS, JobShape, batches, pending_units, prompts_per_batch, share_of

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
