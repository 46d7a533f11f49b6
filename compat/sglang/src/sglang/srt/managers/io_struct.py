"""Tools as programs describe them to a parser."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


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
