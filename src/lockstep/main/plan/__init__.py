"""Plans: the memory and time of a configuration on a TPU slice, worked out with the TPU compiler and no TPU."""

from lockstep.main.plan.alternatives import MeshCost as MeshCost
from lockstep.main.plan.alternatives import RematCost as RematCost
from lockstep.main.plan.alternatives import mesh_costs as mesh_costs
from lockstep.main.plan.alternatives import print_meshes as print_meshes
from lockstep.main.plan.alternatives import print_remat as print_remat
from lockstep.main.plan.alternatives import remat_costs as remat_costs
from lockstep.main.plan.compiler import CompileCache as CompileCache
from lockstep.main.plan.compiler import CompileProgress as CompileProgress
from lockstep.main.plan.compiler import default_directory as default_directory
from lockstep.main.plan.compiler import topology as topology
from lockstep.main.plan.planner import Plan as Plan
from lockstep.main.plan.planner import make_plan as make_plan
from lockstep.main.plan.step_time import StepTime as StepTime
from lockstep.main.plan.step_time import least_time as least_time
from lockstep.main.plan.summary import as_json as as_json
from lockstep.main.plan.table import print_plan as print_plan
from lockstep.main.plan.workload import Workload as Workload
from lockstep.main.plan.workload import place_of as place_of
