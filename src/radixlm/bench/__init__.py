"""The measuring verbs of `radixlm bench`: serve, offline and one-batch.

Flags and result files are those of SGLang's benchmarks. Benchmarks of the source tree itself
(kernels, host time, other engines, long runs) are scripts in `bench/`. Read `serve.py` first.
"""
