"""One file a lineage of models: functions from a checkpoint's config to a ``Decoder``.

Importing this package registers every family (see ``builders.family``).
"""
