"""Tools as programs describe them to a parser, and requests as objects."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class GenerateReqInput:
    """The fields of ``/generate`` as attributes, for ``engine.tokenizer_manager``."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Function(BaseModel):
    """A function with the JSON schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(BaseModel):
    """A tool in OpenAI's form."""

    type: str = "function"
    function: Function
