"""Responses and conversations that the gateway keeps. ``stores.py`` and ``sql.py``: where;
``history.py``: what; ``turn.py``: one POST /v1/responses; ``routes.py``: the rest of the API.
"""
