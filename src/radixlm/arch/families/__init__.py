"""One file a lineage of models: functions from a checkpoint's config to a ``Decoder``.

``arch/registry.py`` says which function describes which architecture; ``builders.py`` holds what
most families share. Read ``llama.py`` first.
"""
