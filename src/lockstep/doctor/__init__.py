"""``lockstep doctor``: what is wrong with a machine, a job or a pod, and what to do about it."""

from lockstep.doctor.examine import examine as examine
from lockstep.doctor.needs import DoctorConfig as DoctorConfig
from lockstep.doctor.needs import read_needs as read_needs
