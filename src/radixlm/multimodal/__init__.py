"""Images, video and audio of a request, up to the arrays that an encoder reads (no torch).

Read ``processor.py`` first: it runs the checkpoint's processor. ``fetch.py`` gets files from URLs
and folders; ``image.py``, ``video.py`` and ``audio.py`` decode them; ``checkpoint.py`` loads the
Hugging Face processor or one of our own. The encoders run in the engine (``executor/media.py``).
"""
