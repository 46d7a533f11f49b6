"""All options of a server: groups of annotated fields, which give the command line, YAML, defaults,
checks and docs/server-arguments.md. No torch.

Read first: ``flag.py``, one group (``memory.py``), ``server_config.py``, ``resolve.py``.
"""
