"""The HTTP server: one module or folder for each API.

``app.py`` makes the application, ``server.py`` runs it, ``workers.py`` runs several processes.
Routes: ``native/`` (/generate), ``openai/``, ``responses/``, ``anthropic.py``, ``ollama.py``,
``pooling/`` (embeddings, scores, ranks), ``speech/``, ``batches/``, ``admin/``. Read first:
``state.py``, ``transport.py``, ``openai/chat.py``.
"""
