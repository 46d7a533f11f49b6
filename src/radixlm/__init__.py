"""RadixLM: a language-model serving engine."""

__version__ = "0.1.0"
