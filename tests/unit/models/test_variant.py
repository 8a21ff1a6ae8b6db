from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, RotaryConfig, Variant
from tests.unit.models.test_config import FULL, SLIDING, SMALL


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layer_types": (FULL,)}, r"layer_types has 1 entries and num_layers is 2.*one for each"),
        ({"layer_types": (FULL, "local")}, r"layer_types\[1\] is 'local'; it must be one of sliding_attention, full"),
        ({"layer_types": (FULL, SLIDING)}, r"layer_types has sliding_attention and variant\.sliding_window is null"),
        ({"layer_types": (FULL, FULL), "sliding_window": 4}, r"variant\.sliding_window is set .* no effect"),
        ({"sliding_window": 4, "sliding_rope": RotaryConfig()}, r"variant\.sliding_rope is set .* no effect"),
        ({"full_attention_every": 2}, r"layer_types has sliding_attention and variant\.sliding_window is null"),
        ({"full_attention_every": 1, "sliding_window": 4}, r"full_attention_every is 1 .*at least 2"),
        ({"full_attention_every": 2, "layer_types": (FULL, FULL)}, r"full_attention_every is 2 and .*layer_types is"),
    ],
)
def test_layer_types_that_cannot_work(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LlamaConfig(**SMALL, variant=Variant(**fields))


@pytest.mark.parametrize(
    ("qk_norm", "fields", "text"),
    [
        (False, ["wide_qk_norm"], r"variant\.wide_qk_norm is true, qk_norm is false: there is no norm"),
        (False, ["norm_after_rope"], r"variant\.norm_after_rope is true, qk_norm is false: there is no norm"),
        (True, ["wide_qk_norm", "norm_after_rope"], r"both true; only norms over each head come after the rotary"),
    ],
)
def test_norms_of_queries_that_cannot_work(qk_norm: bool, fields: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LlamaConfig(**SMALL, qk_norm=qk_norm, variant=Variant(**dict.fromkeys(fields, True)))


def test_the_norms_of_a_layer() -> None:
    before, after = {"attn_norm", "mlp_norm"}, {"attn_post_norm", "mlp_post_norm"}
    assert Variant().norms == before
    assert Variant(post_norm=True).norms == before | after
    assert Variant(pre_norm=False, post_norm=True).norms == after
    assert Variant(parallel=True).norms == {"attn_norm"}
