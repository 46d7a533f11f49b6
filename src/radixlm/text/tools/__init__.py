"""Tool calls in the text of a model: one incremental core, one short file a format.

``registry.create`` builds a parser, ``registry.detect`` picks one by the chat template,
``registry.constraint`` says how a forced call is enforced.
"""
