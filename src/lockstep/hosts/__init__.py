"""The processes of a job: start, waits with deadlines, agreement, leader-only work. No device program is launched."""

from lockstep.hosts._client import Client as Client
from lockstep.hosts._client import JaxClient as JaxClient
from lockstep.hosts._client import MemoryClient as MemoryClient
from lockstep.hosts._client import on_one_machine as on_one_machine
from lockstep.hosts.config import DistributedConfig as DistributedConfig
from lockstep.hosts.config import config_digest as config_digest
from lockstep.hosts.environment import environment as environment
from lockstep.hosts.exchange import MAY_DIFFER as MAY_DIFFER
from lockstep.hosts.exchange import digest as digest
from lockstep.hosts.exit import run_main as run_main
from lockstep.hosts.host_thread import HostThread as HostThread
from lockstep.hosts.host_thread import Stopped as Stopped
from lockstep.hosts.hosts import Hosts as Hosts
from lockstep.hosts.leader import leader_only as leader_only
from lockstep.hosts.leader import try_leader_only as try_leader_only
from lockstep.hosts.ledger import Ledger as Ledger
from lockstep.hosts.phase import Phase as Phase
from lockstep.hosts.preemption import Preemption as Preemption
from lockstep.hosts.start import current as current
from lockstep.hosts.start import shutdown as shutdown
from lockstep.hosts.start import start as start
from lockstep.hosts.watchdog import Watchdog as Watchdog
