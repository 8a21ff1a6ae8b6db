"""The frozen model that a loss compares with."""

from types import SimpleNamespace

import pytest

from lockstep.models import LoraModel
from lockstep.training.run.setup import Setup


def setup(model, resumed_from=None):
    trainer = SimpleNamespace(resumed_from=resumed_from, frozen_copy=lambda model: ("copy of", model))
    return Setup(
        data=[],
        tokenizer=None,
        model=model,
        model_max_seq_len=8,
        initial_model=lambda: "the first model",
        trainer=trainer,
        run_dir=None,
    )


@pytest.mark.parametrize(("resumed_from", "frozen"), [(None, "model"), ("step-4", "the first model")])
def test_the_reference_is_the_model_before_the_first_step(resumed_from, frozen):
    assert setup("model", resumed_from).reference() == ("copy of", frozen)


def test_the_reference_of_adapters_is_their_base_and_no_copy():
    base = object()
    assert setup(LoraModel(base=base, adapters=None, scale=1.0), "step-4").reference() is base
