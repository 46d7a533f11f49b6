"""Steps recorded as CUDA graphs, and steps without requests that run at start."""
