"""Lets the test modules here say ``from harness import run_processes``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
