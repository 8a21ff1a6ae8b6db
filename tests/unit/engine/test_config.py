from typing import Any

import pytest

from lockstep.engine import EngineConfig
from lockstep.engine.config import tensor_size
from lockstep.engine.idle_replicas import count_active
from lockstep.errors import ConfigError
from lockstep.types import Request, SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, r"page_size is 0; it must be at least 1\. Set page_size to a larger number, or to null"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be at least 1"),
        ({"max_seqs": -3}, "max_seqs is -3; it must be at least 1"),
        ({"max_pages": 1}, "max_pages is 1; it must be at least 2"),
        ({"max_seq_len": 1}, "max_seq_len is 1; it must be at least 2"),
        ({"max_steps_per_launch": 0}, "max_steps_per_launch is 0; it must be at least 1"),
        (
            {"page_size": 32, "max_prefill_size": 16},
            r"max_prefill_size is 16 tokens and page_size is 32; prefill works page by page\. Set max_prefill_size to "
            "at least 32, or page_size to at most 16",
        ),
        ({"max_prefill_size": 8}, "max_prefill_size is 8 tokens and page_size is 16"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be float32, bfloat16, float16 or null"),
        ({"layout": "fastest"}, r"layout is 'fastest'; it must be auto, training, \{tensor: N\}"),
        ({"layout": {"tensor": 0}}, "layout is {'tensor': 0}; it must be"),
        ({"layout": {"tensor": 2, "replica": 2}}, "layout is {'tensor': 2, 'replica': 2}; it must be"),
        ({"layout": {"replica": 2}}, "layout is {'replica': 2}; it must be"),
        (
            {"layout": {"tensor": 2, "replicas": 1}},
            r"it must be .*, or \{tensor: 1, replicas: M\} with M",
        ),
        ({"layout": {"tensor": 1, "replicas": 0}}, "layout is .*; it must be"),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_values_that_work() -> None:
    EngineConfig()
    EngineConfig(page_size=8, max_prefill_size=8, layout={"tensor": 1}, dtype="bfloat16", max_pages=2)
    assert [tensor_size(layout) for layout in ("auto", "training", {"tensor": 4})] == [None, None, 4]
    assert count_active("training", 4) == count_active({"tensor": 1}, 4) == 4
    assert count_active({"tensor": 1, "replicas": 2}, 4) == 2
    with pytest.raises(ConfigError, match=r"4 replicas, which 3 does not divide\. Set replicas to one of \[1, 2, 4\]"):
        count_active({"tensor": 1, "replicas": 3}, 4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": 1, "n_generations": 0}, "n_generations is 0; it must be at least 1"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature is -0.1; it must be finite and at least 0"),
        ({"max_new_tokens": 1, "temperature": float("inf")}, "temperature is inf"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature is nan"),
        ({"max_new_tokens": 1, "seed": 2**32}, "seed is 4294967296; it must be at least 0 and less than"),
    ],
)
def test_sampling_that_cannot_work(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt 4 has 0 tokens; the model needs at least 1"):
        Request(prompt_id=4, prompt_tokens=(), params=SamplingParams(max_new_tokens=1))
