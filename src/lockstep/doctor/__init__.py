"""``lockstep doctor``: what is wrong with a machine, a job or a pod, and what to do about it."""

from lockstep.doctor.asked import Asked as Asked
from lockstep.doctor.asked import read_asked as read_asked
from lockstep.doctor.config import DoctorConfig as DoctorConfig
from lockstep.doctor.examine import examine as examine
from lockstep.doctor.finding import Finding as Finding
