"""From a laptop to a pod: one command on every process of a job, on every kind of machine. Standard library only."""

from lockstep.launch.job_loop import interrupt as interrupt
from lockstep.launch.job_loop import signals_to as signals_to
from lockstep.launch.machines import free_port as free_port
from lockstep.launch.machines import local_environment as local_environment
from lockstep.launch.machines import resolve as resolve
from lockstep.launch.main import BACKENDS as BACKENDS
from lockstep.launch.main import add_all_options as add_all_options
from lockstep.launch.main import main as main
from lockstep.launch.main import parse as parse
from lockstep.launch.options import own_words as own_words
from lockstep.launch.options import without_debug as without_debug
from lockstep.launch.slices import Slice as Slice
from lockstep.launch.slices import slices as slices
from lockstep.launch.slices import unpublished as unpublished
