"""What each process of a job launches."""

from lockstep.check.launches import record_launches as record_launches
