"""Structured output: grammars compiled for a tokenizer, and masks of allowed tokens.

The scheduler side is ``engine/features/grammar.py``. Read first: ``spec.py``, then ``compile.py``.
"""
