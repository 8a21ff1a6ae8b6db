"""Plans: the memory and time of a configuration on a TPU slice, worked out with the TPU compiler and no TPU."""

from lockstep.main.plan.alternatives import MeshCost, RematCost, mesh_costs, print_meshes, print_remat, remat_costs
from lockstep.main.plan.cache import CompileCache, CompileProgress, default_directory
from lockstep.main.plan.planner import Plan, make_plan
from lockstep.main.plan.summary import as_json
from lockstep.main.plan.table import print_plan
from lockstep.main.plan.topology import Topology, known_names, topology
from lockstep.main.plan.workload import Infeasibility, SamplingWorkload, TrainingWorkload, Workload, place_of

__all__ = [
    "CompileCache",
    "CompileProgress",
    "Plan",
    "Infeasibility",
    "MeshCost",
    "RematCost",
    "SamplingWorkload",
    "Topology",
    "TrainingWorkload",
    "Workload",
    "as_json",
    "default_directory",
    "known_names",
    "make_plan",
    "mesh_costs",
    "place_of",
    "print_meshes",
    "print_plan",
    "print_remat",
    "remat_costs",
    "topology",
]
