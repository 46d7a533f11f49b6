"""A decoder's step as one call into the C++ kernels: see ``step``. The operations themselves are
emitted by the layers (``layers/program.py``)."""
