from typing import Any

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.engine import EngineConfig
from lockstep.engine.config import tensor_size
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, r"page_size is 0; it must be at least 1\. Set a larger number, or null"),
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
        ({"layout": {"tensor": 2, "replicas": 1}}, r"it must be .*, or \{tensor: 1, replicas: M\} with N and M"),
        (
            {"layout": {"tensor": 4, "expert": 2}},
            r"it must be .*, \{tensor: N, expert: N or 1\} for a model with experts",
        ),
        ({"layout": {"tensor": 1, "replicas": 0}}, "layout is .*; it must be"),
        (
            {"hbm_utilization": 0.0},
            r"hbm_utilization is 0\.0; it must be more than 0 and at most 1.*The default is 0\.9",
        ),
        ({"hbm_utilization": 1.5}, r"hbm_utilization is 1\.5"),
        ({"hbm_utilization": float("nan")}, "hbm_utilization is nan"),
        ({"memory_bytes_per_device": 0}, "memory_bytes_per_device is 0; it must be at least 1"),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_values_that_work() -> None:
    EngineConfig()
    EngineConfig(page_size=8, max_prefill_size=8, layout={"tensor": 1}, dtype="bfloat16", max_pages=2)
    assert [tensor_size(layout) for layout in ("auto", "training", {"tensor": 4}, {"expert": 2})] == [None, None, 4, 2]


def test_weights_have_the_dtype_of_the_engine_or_8_bits() -> None:
    with pytest.raises(ConfigError, match=r"weight_dtype is 'bfloat16'; it must be auto, int8, fp8\. Use auto for the"):
        EngineConfig(weight_dtype="bfloat16")
    assert EngineConfig().quantized_dtype is None
    assert [EngineConfig(weight_dtype=each).quantized_dtype for each in ("int8", "fp8")] == ["int8", "float8_e4m3fn"]


def test_a_kv_cache_dtype_is_auto_or_fp8() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int8'; it must be auto or fp8\. Use auto"):
        EngineConfig(kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="inference_eval: kv_cache_dtype is 'int4'; it must be auto or fp8"):
        InferenceEvalConfig(prompts=["x"], kv_cache_dtype="int4")
    assert InferenceEvalConfig(prompts=["x"], kv_cache_dtype="fp8").engine_config(None).kv_cache_dtype == "fp8"
