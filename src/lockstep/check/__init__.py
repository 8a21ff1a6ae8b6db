"""A search on CPU for what goes wrong on a pod and not on CPU: see docs/check.md."""

from lockstep.check.findings import KINDS as KINDS
from lockstep.check.launches import cache_miss_logger as cache_miss_logger
from lockstep.check.launches import record_launches as record_launches
from lockstep.check.run import check_command as check_command
from lockstep.check.run import print_at_once as print_at_once
from lockstep.check.run import print_report as print_report
from lockstep.check.run import write_page as write_page
