"""The chosen sizes in words."""

from tests.unit.engine.models import request
from tests.unit.engine.sizing.made_up import ROOMY, choose, least_that_works


def test_reasons_and_words() -> None:
    requests = [request(i, 20, 12) for i in range(16)]
    got = choose(requests, ROOMY)
    assert {why for _, why in got.reasons.values()} == {"all requests fit"}
    capped = choose(requests, ROOMY, max_seqs=3, max_steps_per_launch=5)
    assert capped.reasons["max_seqs"] == (3, "cap given") and capped.reasons["max_steps_per_launch"] == (5, "cap given")
    assert capped.reasons["max_pages"][1] == "all requests fit"
    tight = choose(requests, least_that_works(requests) + 20000)
    assert tight.reasons["max_pages"][1] == "memory"
    text = tight.describe()
    for part in ("decode weights", "KV cache", "temporaries", "stay free", "max_pages", ": memory", "* ", "training:"):
        assert part in text, part
    assert choose([request(i, 2, 2) for i in range(300)], ROOMY, layout={"tensor": 1}).reasons["max_seqs"] == (
        256,
        "default",
    )
