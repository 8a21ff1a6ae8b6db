"""The text of compiled programs, their collectives, and compiling for TPU slices without a TPU."""

from lockstep.xla.collectives import Collective as Collective
from lockstep.xla.collectives import CollectiveSum as CollectiveSum
from lockstep.xla.collectives import collectives as collectives
from lockstep.xla.collectives import summed as summed
from lockstep.xla.compiler import CompileCache as CompileCache
from lockstep.xla.compiler import CompileProgress as CompileProgress
from lockstep.xla.compiler import Summary as Summary
from lockstep.xla.compiler import default_directory as default_directory
from lockstep.xla.hlo import Array as Array
from lockstep.xla.hlo import Hlo as Hlo
from lockstep.xla.hlo import Op as Op
from lockstep.xla.hlo import Run as Run
from lockstep.xla.hlo import vmem as vmem
from lockstep.xla.topology import Topology as Topology
from lockstep.xla.topology import names_of as names_of
from lockstep.xla.topology import topology as topology
