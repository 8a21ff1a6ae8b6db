#!/usr/bin/env python3
"""``lockstep launch`` from a checkout, before anything is installed: it needs nothing but Python >= 3.12."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from lockstep.launch import main

if __name__ == "__main__":
    sys.exit(main())
