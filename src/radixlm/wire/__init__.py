"""Records and fields that cross a border: messages between processes, and fields of request bodies.

Read first: ``requests.py``, ``replies.py``, ``sampling_params.py``. ``fields.py`` is the table of
request fields; how bodies are parsed is in ``entrypoints/request_model.py``.
"""
