"""Models that read images, video or audio: what is special about each, as data.

``registry.py`` has one ``MultimodalSpec`` a model (read ``spec.py`` first); ``from_config.py``
fills it from config.json, ``config_json.py`` brings published configs to one form. ``composite.py``
describes the language model of such a checkpoint by that model's own family. ``layouts/`` maps
checkpoints whose encoder has other keys and tensor names than its Hugging Face class. The encoders
themselves are in ``models/encoders``, processors in ``radixlm.multimodal``.
"""
