"""The processes of a job: start, waits with deadlines, agreement, leader-only work. No device program is launched."""

from lockstep.hosts._client import JaxClient as JaxClient
from lockstep.hosts._client import MemoryClient as MemoryClient
from lockstep.hosts._client import on_one_machine as on_one_machine
from lockstep.hosts._client import tpu_chips as tpu_chips
from lockstep.hosts.config import COORDINATOR_ADDRESS as COORDINATOR_ADDRESS
from lockstep.hosts.config import FLAG_VARIABLES as FLAG_VARIABLES
from lockstep.hosts.config import DistributedConfig as DistributedConfig
from lockstep.hosts.config import config_digest as config_digest
from lockstep.hosts.config import environment as environment
from lockstep.hosts.exchange import MAY_DIFFER as MAY_DIFFER
from lockstep.hosts.exchange import digest as digest
from lockstep.hosts.exchange import name_processes as name_processes
from lockstep.hosts.fault import earlier_attempts as earlier_attempts
from lockstep.hosts.hosts import Hosts as Hosts
from lockstep.hosts.hosts import ready_on_all as ready_on_all
from lockstep.hosts.own_work import HostThread as HostThread
from lockstep.hosts.own_work import Stopped as Stopped
from lockstep.hosts.own_work import leader_only as leader_only
from lockstep.hosts.own_work import try_leader_only as try_leader_only
from lockstep.hosts.peers import end_process as end_process
from lockstep.hosts.phase import Ledger as Ledger
from lockstep.hosts.phase import Phase as Phase
from lockstep.hosts.run_main import run_main as run_main
from lockstep.hosts.start import current as current
from lockstep.hosts.start import start as start
from lockstep.hosts.watchdog import Watchdog as Watchdog
