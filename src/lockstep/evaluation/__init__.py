"""Tasks of lm-evaluation-harness on the model as it is, on all hosts in lockstep."""

from lockstep.evaluation.config import TasksConfig as TasksConfig
from lockstep.evaluation.results import PREFIX as PREFIX
from lockstep.evaluation.results import TaskResults as TaskResults
from lockstep.evaluation.results import TaskRow as TaskRow
from lockstep.evaluation.task_rounds import TaskRounds as TaskRounds
