"""Reasoning parsers: a table of markers (``table.py``) and one incremental parser (``markup.py``).

``registry.create`` makes a parser, ``registry.detect`` picks one by the chat template. A tool-call
parser reads the text that a reasoning parser returns.
"""
