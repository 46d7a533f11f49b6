"""The version of sglang-router whose names these are."""

__version__ = "0.3.2"
