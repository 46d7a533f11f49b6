"""YaRN's attention scale, apart from ``rope.py`` so that describing a model imports no numpy."""

import math


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor of queries and keys when YaRN extends the context by ``factor``
    (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
