"""The configuration of train-preference."""

import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.training import DpoConfig, OrpoConfig, SimpoConfig, TrainPreferenceConfig
from tests.unit.training.objectives.test_preference import FILE


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], DpoConfig(beta=0.5)),
        (["--objective", "{type: dpo, label_smoothing: 0.1}"], DpoConfig(label_smoothing=0.1)),
        (["--objective", "{type: orpo, beta: 0.2}"], OrpoConfig(beta=0.2)),
        (["--objective", "{type: simpo}"], SimpoConfig()),
    ],
)
def test_the_command_takes_each(arguments, expected):
    config = parse_arguments(TrainPreferenceConfig, [*FILE, *arguments])
    assert config.loss_fn == expected and config.has_reference == isinstance(expected, DpoConfig)
    columns = {name: (one.shape, one.dtype.name) for name, one in config.columns(48).items()}
    pair = {"tokens": ((2, 32), "int32"), "loss_mask": ((2, 32), "bool")}
    assert columns == pair | ({"reference_logprobs": ((2,), "float32")} if config.has_reference else {})


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ("{type: dop}", "'objective.type' is 'dop'. Did you mean 'dpo'?"),
        ("{type: dpo, betta: 1}", "unknown key 'objective.betta'. Did you mean 'beta'?"),
        ("{type: 'no_module_of_this_name:Mine'}", "module 'no_module_of_this_name' could not be imported"),
        ("{type: 'math:sqrt'}", "type 'math:sqrt' is not a subclass of PreferenceObjective"),
    ],
)
def test_one_that_is_not_there_is_an_error_with_a_name(objective, text):
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        parse_arguments(TrainPreferenceConfig, [*FILE, "--objective", objective])
