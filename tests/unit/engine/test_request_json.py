"""Requests survive a way through JSON."""

import json

from lockstep.engine import requests_from_json, requests_to_json
from lockstep.types import Drafts, Request, SamplingParams


def test_requests_come_back_as_they_were():
    requests = [
        Request(prompt_id=3, prompt_tokens=(1, 2), params=SamplingParams(max_new_tokens=2, stop=("x",))),
        Request(
            prompt_id=4,
            prompt_tokens=(5,),
            params=SamplingParams(max_new_tokens=1, logit_bias=((3, 1.5), (4, -2.0)), allowed_token_ids=(3, 4)),
        ),
        Request(
            prompt_id=5,
            prompt_tokens=(5,),
            params=SamplingParams(max_new_tokens=1),
            drafts=Drafts(answers=((1, 2), (), (3,)), ngrams=True),
        ),
    ]
    found = requests_from_json(json.loads(json.dumps(requests_to_json(requests))))
    assert found == requests and hash(found[1].params) == hash(requests[1].params)
