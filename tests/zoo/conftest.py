"""Makes the scripts of zoo/ importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "zoo"), str(ROOT / "tests")]
