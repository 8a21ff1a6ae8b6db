"""The names under which checkpoints store a tensor."""

import pytest

from lockstep.models.hf.stored_names import EMBED, HEAD, StoredName, stored_names

PREFIXES = ("model.", "", "model.model.", "model.language_model.", "language_model.model.")
HEADS = [HEAD, f"model.{HEAD}", f"language_model.{HEAD}"]
EXPERT = "model.layers.1.mlp.experts.3.{}.weight"


@pytest.mark.parametrize(
    ("name", "tied", "stored"),
    [
        ("model.norm.weight", True, [f"{prefix}norm.weight" for prefix in PREFIXES]),
        (HEAD, False, HEADS),
        (EMBED, False, [f"{prefix}embed_tokens.weight" for prefix in PREFIXES]),
        (EMBED, True, [*(f"{prefix}embed_tokens.weight" for prefix in PREFIXES), *HEADS]),
        (
            "model.layers.0.block_sparse_moe.gate.weight",
            False,
            [f"{prefix}layers.0.{module}.gate.weight" for module in ("block_sparse_moe", "mlp") for prefix in PREFIXES],
        ),
    ],
)
def test_the_usual_name_comes_first(name: str, tied: bool, stored: list[str]) -> None:
    assert [place.name for place in stored_names(name, tied=tied)] == stored


@pytest.mark.parametrize(
    ("part", "stored", "first"),
    [("gate_proj", "gate_up_proj", 60), ("up_proj", "gate_up_proj", 70), ("w1", "gate_up_proj", 60),
     ("w3", "gate_up_proj", 70), ("down_proj", "down_proj", 60), ("w2", "down_proj", 60)],
)  # fmt: skip
def test_an_expert_may_be_a_part_of_one_tensor(part: str, stored: str, first: int) -> None:
    places = [place for place in stored_names(EXPERT.format(part)) if place.expert is not None]
    assert {place.name for place in places} == {f"{prefix}layers.1.mlp.experts.{stored}" for prefix in PREFIXES}
    assert places[0].rows((5, 20, 7)) == (first, (10 if stored == "gate_up_proj" else 20, 7))
    assert places[0].fits((4, 20, 7)) and not any(places[0].fits(shape) for shape in ((3, 20, 7), (4, 21, 7), (80, 7)))


def test_experts_of_another_family_are_stored_under_their_own_name_alone() -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert all(place == StoredName(place.name) for place in stored_names(name))
