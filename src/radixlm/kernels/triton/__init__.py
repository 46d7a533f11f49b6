"""Triton kernels for NVIDIA GPUs (sm_80 and newer), one file per family of ops.

Nothing here is imported before a backend asks for it: triton is an optional extra.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the rule of 3.x, said before 3.10 turns
