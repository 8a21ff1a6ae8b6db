"""The scheduler: what to launch next, in plain Python and NumPy; every host computes the same from the same results."""

from lockstep.engine.schedule.batch import Batch as Batch
from lockstep.engine.schedule.batch import Capacity as Capacity
from lockstep.engine.schedule.batch import CopyPagesBatch as CopyPagesBatch
from lockstep.engine.schedule.batch import DecodeBatch as DecodeBatch
from lockstep.engine.schedule.batch import PrefillBatch as PrefillBatch
from lockstep.engine.schedule.batch import PromptLogprobsBatch as PromptLogprobsBatch
from lockstep.engine.schedule.batch import SamplingBatch as SamplingBatch
from lockstep.engine.schedule.batch import VerifyBatch as VerifyBatch
from lockstep.engine.schedule.intake import FindStop as FindStop
from lockstep.engine.schedule.intake import check_capacity as check_capacity
from lockstep.engine.schedule.intake import check_length as check_length
from lockstep.engine.schedule.intake import sampling_sizes as sampling_sizes
from lockstep.engine.schedule.pages import NULL_PAGE as NULL_PAGE
from lockstep.engine.schedule.pages import PageAllocator as PageAllocator
from lockstep.engine.schedule.scheduler import Scheduler as Scheduler
from lockstep.engine.schedule.sequence import Counts as Counts
from lockstep.engine.schedule.sequence import DecodeResults as DecodeResults
from lockstep.engine.schedule.sequence import DraftCounts as DraftCounts
from lockstep.engine.schedule.sequence import RoutedShape as RoutedShape
from lockstep.engine.schedule.sequence import as_floats as as_floats
from lockstep.engine.schedule.sequence import digest_parts as digest_parts
