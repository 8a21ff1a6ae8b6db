"""Paged-attention generation on the devices that a model lies on."""

from lockstep.engine.agreement import settled as settled
from lockstep.engine.auditor import Auditor as Auditor
from lockstep.engine.auditor import audit as audit
from lockstep.engine.budget import Budget as Budget
from lockstep.engine.config import EngineConfig as EngineConfig
from lockstep.engine.engine import Engine as Engine
from lockstep.engine.program import Compilation as Compilation
from lockstep.engine.program import Program as Program
from lockstep.engine.program import compile_program as compile_program
from lockstep.hosts import Ledger as Ledger
