"""Paged-attention generation on the devices that a model lies on."""

from lockstep.device.program import Compilation as Compilation
from lockstep.device.program import Program as Program
from lockstep.device.program import compile_program as compile_program
from lockstep.engine.agreement import settled as settled
from lockstep.engine.audit import Auditor as Auditor
from lockstep.engine.audit import audit as audit
from lockstep.engine.budget import Budget as Budget
from lockstep.engine.capacity_fields import CapacityFields as CapacityFields
from lockstep.engine.config import EngineConfig as EngineConfig
from lockstep.engine.engine import Engine as Engine
from lockstep.hosts import Ledger as Ledger
