"""/v1/audio/transcriptions and translations: ``routes.py`` first, ``transcribers.py`` by model."""
