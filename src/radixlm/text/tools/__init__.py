"""Tool-call parsers: one shared incremental parser (``markup.py``), a short file per format.

``registry.create`` makes a parser, ``registry.detect`` picks one by the chat template,
``registry.constraint`` returns the grammar of a forced call. Read first: ``table.py``.
"""
