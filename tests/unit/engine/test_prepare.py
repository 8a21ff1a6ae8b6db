"""Requests whose numbers the model cannot use."""

from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.errors import ConfigError
from tests.unit.engine.models import mesh_of, model_on, request

REFUSED = [
    ({"logit_bias": ((40, 1.0),)}, "logit_bias of prompt 0 has 40; the ids that can be sampled are 0 to 29"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias of prompt 0 has -1"),
    ({"allowed_token_ids": (3, 30)}, "allowed_token_ids of prompt 0 has 30; the ids that can be sampled are 0 to 29"),
    ({"top_logprobs": 31}, "top_logprobs of prompt 0 is 31; there are 30 tokens. Set it to at most 30"),
    (
        {"stop_token_ids": tuple(range(30)), "min_tokens": 1},
        "all 30 tokens are stop tokens of prompt 0 and min_tokens is 1, so that none could be sampled. Remove a stop",
    ),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_what_the_vocabulary_does_not_have(params: dict[str, Any], message: str) -> None:
    engine = Engine(EngineConfig(), mesh_of("1,1,1"), vocab_size=30)
    with pytest.raises(ConfigError, match=message):
        engine.check(model_on("1,1,1"), [request(0, 9, 4, **params)])
