"""The scheduler: what to launch next, in plain Python and NumPy; every host computes the same from the same results."""

from lockstep.schedule.batch import Capacity as Capacity
from lockstep.schedule.batch import CopyPagesBatch as CopyPagesBatch
from lockstep.schedule.batch import DecodeBatch as DecodeBatch
from lockstep.schedule.batch import PrefillBatch as PrefillBatch
from lockstep.schedule.batch import PromptLogprobsBatch as PromptLogprobsBatch
from lockstep.schedule.batch import VerifyBatch as VerifyBatch
from lockstep.schedule.capacity import check_capacity as check_capacity
from lockstep.schedule.capacity import check_length as check_length
from lockstep.schedule.counts import Counts as Counts
from lockstep.schedule.counts import DraftCounts as DraftCounts
from lockstep.schedule.pages import NULL_PAGE as NULL_PAGE
from lockstep.schedule.pages import PageAllocator as PageAllocator
from lockstep.schedule.results import DecodeResults as DecodeResults
from lockstep.schedule.results import as_floats as as_floats
from lockstep.schedule.sampling import SamplingBatch as SamplingBatch
from lockstep.schedule.sampling import sampling_sizes as sampling_sizes
from lockstep.schedule.scheduler import FindStop as FindStop
from lockstep.schedule.scheduler import Scheduler as Scheduler
