"""What drafts saved, of one round and of several."""

from lockstep.engine.schedule.counts import DraftCounts


def test_counts_of_several_rounds_are_added_and_told() -> None:
    rounds = [DraftCounts(tokens=10, steps=4, drafted=8, right=5), DraftCounts(tokens=20, steps=16, drafted=2, right=1)]
    total = DraftCounts.sum(rounds)
    assert total == DraftCounts(tokens=30, steps=20, drafted=10, right=6)
    assert total.metrics() == {"drafts/accepted_share": 0.6, "drafts/steps_saved": 10, "drafts/tokens_per_step": 1.5}
    assert str(total) == "60% right, 10 of 30 steps saved"


def test_nothing_was_sampled() -> None:
    nothing = DraftCounts.sum([])
    assert set(nothing.metrics().values()) == {0} and str(nothing) == "0% right, 0 of 0 steps saved"
