"""Speculative decoding: which tokens may come next, and how many of them are worth verifying."""
