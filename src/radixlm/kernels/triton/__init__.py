"""Triton kernels for NVIDIA GPUs (sm_80 and newer), one file per family of ops.

Nothing here is imported before a backend asks for it: triton is an optional extra.
"""
