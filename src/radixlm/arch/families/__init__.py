"""One file a lineage of models: functions from a checkpoint's config to a ``Decoder``.

``lineages.py`` says which file describes what; it is imported when it is asked for.
"""
