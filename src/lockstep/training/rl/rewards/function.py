"""A reward of the user's own."""

import dataclasses

from lockstep.errors import ConfigError
from lockstep.report import load_metric
from lockstep.training.rl.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("function")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionReward(RewardConfig):
    """What a function of an importable module returns for (row, prompt), as for metrics; it may be ``async``.

    Raises:
        ConfigError: ``function`` is not written as ``module:function``.
    """

    function: str
    """``module:function``; its directory must be on ``PYTHONPATH`` on every host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, function = self.function.partition(":")
        if not (module and colon and function):
            raise ConfigError(
                f"rewards: function is {self.function!r}; it must be module:function, such as my_rewards:judge."
            )

    @property
    def label(self) -> str:
        """The name of the function, where no other is given."""
        return self.name or self.function.rpartition(":")[2]

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        function: Reward = load_metric(self.function)  # type: ignore[assignment]  # a metric that may be async
        return function
