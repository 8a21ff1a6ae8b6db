"""The prompts of a round: which they are, and how they travel."""

from lockstep.callback.round_prompts import RoundPrompts, from_bytes, to_bytes
from tests.unit.engine.models import request


def test_parameters_travel_whole() -> None:
    sent = [
        request(0, 5, 8, logit_bias=((1, 0.5), (2, -1.0)), allowed_token_ids=(1, 2, 3), top_k=4, stop_token_ids=(3,)),
        request(1, 5, 8, min_tokens=2, ignore_eos=True, top_p=0.3),
    ]
    for questions in (RoundPrompts(requests=sent), RoundPrompts(requests=sent[:1], largest=sent)):
        assert from_bytes(to_bytes(questions)) == questions
