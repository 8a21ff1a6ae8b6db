"""Tasks of lm-evaluation-harness on the model as it is, on all hosts in lockstep."""

from lockstep.callback.evaluation.config import TasksConfig as TasksConfig
from lockstep.callback.evaluation.model_session import ModelSession as ModelSession
from lockstep.callback.evaluation.model_session import limits_of as limits_of
from lockstep.callback.evaluation.round import TaskRounds as TaskRounds
from lockstep.callback.evaluation.scoring import PREFIX as PREFIX
from lockstep.callback.evaluation.scoring import TaskResults as TaskResults
