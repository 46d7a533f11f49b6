"""The ways into RadixLM: the command line, the HTTP server and the offline engine.

``cli.py`` lists the verbs, ``offline.py`` is ``radixlm.Engine``, ``http/`` the server. The native
API (``/generate``), which both share, is in ``native/``. Read first: ``offline.py``.
"""
