"""Workers that are found: ``kubernetes.py`` watches pods, ``names.py`` asks DNS, ``lists.py`` reads
a file. ``source.py`` tells the registry.
"""
