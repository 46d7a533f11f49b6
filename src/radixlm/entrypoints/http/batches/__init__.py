"""OpenAI's files and batches. ``runner.py`` runs batches, ``lines.py`` answers one line."""
