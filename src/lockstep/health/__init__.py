"""Health of answers: how they went wrong, said without reading them (docs/health.md)."""

from lockstep.health.alarm import Alarm as Alarm
from lockstep.health.alarm import PromptStates as PromptStates
from lockstep.health.alarms import Alarms as Alarms
from lockstep.health.answer import AnsweredPrompt as AnsweredPrompt
from lockstep.health.answer import Health as Health
from lockstep.health.answer import RoundHealth as RoundHealth
from lockstep.health.answer import Share as Share
from lockstep.health.answer import State as State
from lockstep.health.answer import Vocabulary as Vocabulary
from lockstep.health.answer import measure_health as measure_health
from lockstep.health.answer import measure_round as measure_round
from lockstep.health.answer import shares as shares
from lockstep.health.groups import prompt_groups as prompt_groups
from lockstep.health.loops import Run as Run
from lockstep.health.loops import runs as runs
from lockstep.health.markers import turn_markers as turn_markers
from lockstep.health.markers import unbalanced_marker as unbalanced_marker
from lockstep.health.scripts import script_letters as script_letters
