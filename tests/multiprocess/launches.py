"""What tests compare of the launches of each host: `lockstep.check` and `lockstep.testing` under their old address."""

from lockstep.check import record_launches as record_launches
from lockstep.testing import assert_same_launches as assert_same_launches
