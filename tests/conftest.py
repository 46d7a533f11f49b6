"""Set before anything imports triton: kernels of this process are interpreted on CPU tensors.

``TRITON_INTERPRET=0`` in the environment leaves them to a GPU.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
