"""Tasks of lm-evaluation-harness on the model as it is, on all hosts in lockstep."""

from lockstep.callback.evaluation.config import TasksConfig as TasksConfig
from lockstep.callback.evaluation.results import PREFIX as PREFIX
from lockstep.callback.evaluation.results import TaskResults as TaskResults
from lockstep.callback.evaluation.results import TaskRow as TaskRow
from lockstep.callback.evaluation.task_rounds import TaskRounds as TaskRounds
