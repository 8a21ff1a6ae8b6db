"""Lets the test modules here use what the tests with several processes use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))
