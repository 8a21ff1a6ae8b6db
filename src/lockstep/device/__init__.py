"""Device programs, the memory that they run in, and the chips that they run on."""

from lockstep.device.calibration import calibrated as calibrated
from lockstep.device.calibration import save_calibration as save_calibration
from lockstep.device.chips import Chip as Chip
from lockstep.device.chips import Link as Link
from lockstep.device.chips import chip_named as chip_named
from lockstep.device.chips import chip_of as chip_of
from lockstep.device.chips import hops as hops
from lockstep.device.chips import published_chip as published_chip
from lockstep.device.compiler_errors import Compile as Compile
from lockstep.device.compiler_errors import compile_lowered as compile_lowered
from lockstep.device.compiler_errors import compile_with_options as compile_with_options
from lockstep.device.compiler_errors import explain as explain
from lockstep.device.float8 import BYTE as BYTE
from lockstep.device.float8 import FP8 as FP8
from lockstep.device.float8 import LARGEST_FP8 as LARGEST_FP8
from lockstep.device.float8 import as_numbers as as_numbers
from lockstep.device.memory import block_bytes as block_bytes
from lockstep.device.memory import free_bytes as free_bytes
from lockstep.device.memory import peak_bytes as peak_bytes
from lockstep.device.memory import used_bytes as used_bytes
from lockstep.device.program import AroundLaunch as AroundLaunch
from lockstep.device.program import Compilation as Compilation
from lockstep.device.program import Program as Program
from lockstep.device.program import compile_program as compile_program
from lockstep.device.program import fetch as fetch
from lockstep.device.program import start_fetch as start_fetch
