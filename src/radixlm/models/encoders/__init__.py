"""Encoders: text encoders on the engine's own layers (``text.py``), vision and audio encoders as
Hugging Face modules (``transformers_encoder.py``) or modules of our own where transformers has none
(``custom.py``)."""
