"""Language models inside multimodal checkpoints, by the model_type of their text_config, and some
that are published under another one.

A row of text_models.json has the ``model_type`` of the text model with the same layers, and the
defaults of its config class where they differ from that one's.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return rows


def as_text_model(model_type: str, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the model_type that describes the layers, ``raw`` with defaults); others as they are."""
    row = _rows().get(model_type)
    if row is None:
        return model_type, raw
    filled = {key: value for key, value in row.items() if key != "model_type"}
    return str(row["model_type"]), filled | raw
