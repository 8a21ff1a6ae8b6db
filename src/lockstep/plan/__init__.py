"""Plans: the memory and time of a configuration on a TPU slice, worked out with the TPU compiler and no TPU."""

from lockstep.plan.alternatives import MeshCost as MeshCost
from lockstep.plan.alternatives import RematCost as RematCost
from lockstep.plan.alternatives import mesh_costs as mesh_costs
from lockstep.plan.alternatives import print_meshes as print_meshes
from lockstep.plan.alternatives import print_remat as print_remat
from lockstep.plan.alternatives import remat_costs as remat_costs
from lockstep.plan.planner import Plan as Plan
from lockstep.plan.planner import make_plan as make_plan
from lockstep.plan.step_time import StepTime as StepTime
from lockstep.plan.step_time import least_time as least_time
from lockstep.plan.summary import as_json as as_json
from lockstep.plan.table import print_plan as print_plan
from lockstep.plan.workload import Workload as Workload
from lockstep.plan.workload import place_of as place_of
