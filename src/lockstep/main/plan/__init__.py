"""What a configuration would do on a TPU slice, worked out with the TPU compiler and no TPU."""

from lockstep.main.plan.cache import CompileCache, default_directory
from lockstep.main.plan.compile_progress import CompileProgress
from lockstep.main.plan.infeasibility import Infeasibility, place_of
from lockstep.main.plan.meshes import MeshCost, mesh_costs, print_meshes
from lockstep.main.plan.planner import Plan, make_plan
from lockstep.main.plan.remat import RematCost, print_remat, remat_costs
from lockstep.main.plan.summary import as_json
from lockstep.main.plan.table import print_plan
from lockstep.main.plan.topology import Topology, known_names, topology
from lockstep.main.plan.workload import SamplingWorkload, TrainingWorkload, Workload

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
