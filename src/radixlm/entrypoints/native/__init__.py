"""The native API (``/generate``), which HTTP and the offline engine share.

``request.py`` reads a body into requests for intake; ``response.py`` writes their answers. The HTTP
routes are in ``entrypoints/http/native``.
"""
