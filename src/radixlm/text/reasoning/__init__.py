"""Split what a model thinks from what it answers: a table of markers, one incremental parser.

``registry.create`` builds a parser, ``registry.detect`` picks one by the chat template; its text
output is what a tool parser is fed.
"""
