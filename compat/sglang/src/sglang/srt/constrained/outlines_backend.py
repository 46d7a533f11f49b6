"""``build_regex_from_object``, by outlines-core."""

from __future__ import annotations

import json
from typing import Any

from radixlm.base.lazy import load


def build_regex_from_object(object: Any, whitespace_pattern: str | None = None) -> str:
    """The regular expression of a pydantic class, a schema, or its text."""
    if hasattr(object, "model_json_schema"):
        object = object.model_json_schema()
    schema = object if isinstance(object, str) else json.dumps(object)
    build = load("outlines_core.json_schema:build_regex_from_schema")
    return str(build(schema, whitespace_pattern))
