"""What to launch next, in plain Python and NumPy: every host computes the same plans from the same results."""

from lockstep.schedule.capacity import check_capacity as check_capacity
from lockstep.schedule.capacity import check_length as check_length
from lockstep.schedule.pages import NULL_PAGE as NULL_PAGE
from lockstep.schedule.pages import PageAllocator as PageAllocator
from lockstep.schedule.plan import DecodePlan as DecodePlan
from lockstep.schedule.plan import ForkPlan as ForkPlan
from lockstep.schedule.plan import PrefillPlan as PrefillPlan
from lockstep.schedule.plan import ScheduleSizes as ScheduleSizes
from lockstep.schedule.plan import ScorePlan as ScorePlan
from lockstep.schedule.sampling import SamplingPlan as SamplingPlan
from lockstep.schedule.sampling import sampling_sizes as sampling_sizes
from lockstep.schedule.scheduler import FindStop as FindStop
from lockstep.schedule.scheduler import Scheduler as Scheduler
