"""Decoders of transformers on the paged cache (``--model-impl transformers``). Read ``model``."""
