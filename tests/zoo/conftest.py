"""The zoo is a folder of scripts: its modules are found by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo"))
