"""The objectives that training minimises."""

from lockstep.training.objectives.cpo import CpoConfig as CpoConfig
from lockstep.training.objectives.dpo import DpoConfig as DpoConfig
from lockstep.training.objectives.grpo import TEACHER as TEACHER
from lockstep.training.objectives.grpo import GrpoConfig as GrpoConfig
from lockstep.training.objectives.kto import DESIRABLE as DESIRABLE
from lockstep.training.objectives.kto import KtoConfig as KtoConfig
from lockstep.training.objectives.logprobs import ROUTING as ROUTING
from lockstep.training.objectives.logprobs import LossFn as LossFn
from lockstep.training.objectives.logprobs import LossParts as LossParts
from lockstep.training.objectives.logprobs import lm_loss as lm_loss
from lockstep.training.objectives.logprobs import needs_vocab_blocks as needs_vocab_blocks
from lockstep.training.objectives.logprobs import routing_column as routing_column
from lockstep.training.objectives.logprobs import token_logprobs as token_logprobs
from lockstep.training.objectives.logprobs import with_routing as with_routing
from lockstep.training.objectives.orpo import OrpoConfig as OrpoConfig
from lockstep.training.objectives.policy_loss import GrpoFields as GrpoFields
from lockstep.training.objectives.policy_loss import PolicyLoss as PolicyLoss
from lockstep.training.objectives.preference import REFERENCE as REFERENCE
from lockstep.training.objectives.preference import PairLogprobs as PairLogprobs
from lockstep.training.objectives.preference import PairLosses as PairLosses
from lockstep.training.objectives.preference import PreferenceObjective as PreferenceObjective
from lockstep.training.objectives.simpo import SimpoConfig as SimpoConfig
