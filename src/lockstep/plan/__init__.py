"""What a configuration would do on a TPU slice, worked out with the TPU compiler and no TPU."""

from lockstep.plan.cache import CompileCache, default_directory
from lockstep.plan.infeasibility import Infeasibility, place_of
from lockstep.plan.planner import Plan, make_plan
from lockstep.plan.progress import Progress
from lockstep.plan.summary import as_json
from lockstep.plan.table import print_plan
from lockstep.plan.topology import Topology, known_names, topology
from lockstep.plan.workload import SamplingWork, TrainingWork, Work

__all__ = [
    "CompileCache",
    "Plan",
    "Progress",
    "Infeasibility",
    "SamplingWork",
    "Topology",
    "TrainingWork",
    "Work",
    "as_json",
    "default_directory",
    "known_names",
    "make_plan",
    "place_of",
    "print_plan",
    "topology",
]
