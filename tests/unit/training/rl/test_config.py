import dataclasses
import re

import pytest

from lockstep.engine import CapacityFields
from lockstep.errors import ConfigError
from lockstep.report import AlarmsConfig
from lockstep.training import RolloutConfig
from lockstep.training.rl import GrpoRunFields
from lockstep.training.rl.rewards import Gsm8kReward


def test_a_rollout_is_for_all_iterations_of_all_minibatches():
    fields = GrpoRunFields(num_iterations=2, minibatches=3)
    fields.check_run(16, 300, None)
    cut_at_text = RolloutConfig(ignore_eos=True, stop=["."])
    dataclasses.replace(fields, mask_truncated=True, rollout=cut_at_text).check_run(16, 300, None)
    assert fields.updates == 6 and fields.rewards == [Gsm8kReward()]


OFF_POLICY = {
    "filters": ("my_filters:mine=0.5",),
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 4,
    "kv_cache_dtype": "fp8",
    "weight_dtype": "int8",
}
"""Settings with which answers are drawn from other probabilities, with a value that does that."""

ON_POLICY = {"max_new_tokens", "temperature", "ignore_eos", "n_generations", "seed", "stop_token_ids", "stop", "drafts"}
ON_POLICY |= {"max_attempts", "filter_by", "replay_routing", "health", "alarms"} | {
    each.name for each in dataclasses.fields(CapacityFields)
} - OFF_POLICY.keys()


def test_alarms_without_health_are_refused():
    with pytest.raises(ConfigError, match="rollout.health is false, so rollout.alarms has no effect"):
        RolloutConfig(health=False, alarms=AlarmsConfig(on_alarm="stop"))
    RolloutConfig(health=False, alarms=AlarmsConfig(on_alarm=None))


def test_every_setting_of_a_rollout_is_known_to_change_the_probabilities_or_not():
    assert {each.name for each in dataclasses.fields(RolloutConfig)} == OFF_POLICY.keys() | ON_POLICY
    assert set(RolloutConfig.OFF_POLICY) == OFF_POLICY.keys()
    assert RolloutConfig().temperature == 1, "where nothing is said, answers are the model's own"


@pytest.mark.parametrize(("name", "value"), [*OFF_POLICY.items(), ("weight_dtype", "fp8")])
def test_answers_of_other_probabilities_need_the_correction(name, value):
    fields = GrpoRunFields(rollout=RolloutConfig(**{name: value}))
    fields.check_run(16, 300, 2.0)
    given = rf"rollout\.{name} is {re.escape(str(value))} and importance_cap is null"
    text = rf"{given}: .* Set importance_cap to 2 .* rollout\.{name} out"
    with pytest.raises(ConfigError, match=text):
        fields.check_run(16, 300, None)


def test_a_rollout_ahead_needs_the_correction_and_no_rewards_before_the_next():
    ahead = GrpoRunFields(rollout_ahead=1)
    ahead.check_run(16, 300, 2.0)
    with pytest.raises(ConfigError, match=r"rollout_ahead is 1 and importance_cap is null: .* Set importance_cap to 2"):
        ahead.check_run(16, 300, None)
    with pytest.raises(ConfigError, match="rollout_ahead is 2; it must be 0 .* or 1"):
        dataclasses.replace(ahead, rollout_ahead=2).check_run(16, 300, 2.0)
    dynamic = dataclasses.replace(ahead, rollout=RolloutConfig(max_attempts=3))
    with pytest.raises(ConfigError, match=r"rollout\.max_attempts is 3: .* Set rollout_ahead to 0, or"):
        dynamic.check_run(16, 300, 2.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_iterations": 0}, "num_iterations is 0; it must be at least 1"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"reward_workers": 0}, "reward_workers is 0"),
        ({"answers_shown": -1}, "answers_shown is -1; it must be at least 0"),
        ({"reward_timeout_s": 0}, "reward_timeout_s is 0; it must be more than 0"),
        ({"reward_timeout_s": 300}, r"reward_timeout_s is 300 and hosts wait 300 s .*trainer\.distributed\.timeout_s"),
        ({"rewards": []}, "rewards is empty"),
        (
            {"mask_truncated": True, "rollout": RolloutConfig(ignore_eos=True)},
            r"mask_truncated is true, rollout\.ignore_eos is true and rollout\.stop is empty: .* or give rollout\.stop",
        ),
        ({}, r"train_batch_size is 20 answers and rollout\.n_generations is 8; .* Use a multiple of 8, e\.g\. 16"),
    ],
)
def test_settings_that_cannot_work(values, text):
    fields = dataclasses.replace(GrpoRunFields(), **values)
    with pytest.raises(ConfigError, match=text):
        fields.check_run(16 if values else 20, 300, None)
