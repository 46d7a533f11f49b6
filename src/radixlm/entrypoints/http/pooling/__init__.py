"""Routes of models that give vectors or scores. ``pool.py`` is what they share."""
