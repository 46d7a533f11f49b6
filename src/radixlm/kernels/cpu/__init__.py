"""CPU kernels in C++ (``csrc/``).

``available`` says whether ``radixlm._cpu`` could be imported, ``reason`` why not, ``isa`` which
instruction set runs. The other modules of this package need ``available``.
"""

from radixlm.kernels.cpu.extension import available, describe, isa, reason

__all__ = ["available", "describe", "isa", "reason"]
