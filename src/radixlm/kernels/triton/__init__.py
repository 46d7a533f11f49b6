"""Triton kernels for NVIDIA GPUs (sm_80 and newer), one file per family of ops.

A backend imports this package only when it needs it: triton is an optional extra.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.10 changes the default
