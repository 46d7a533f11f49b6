"""docs/api.md, from the code: ``python -m radixlm.entrypoints.http.openapi.docs [FILE]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from radixlm.entrypoints.http.app import bare_app
from radixlm.entrypoints.http.middleware import ADMIN_PATHS, OPEN_PATHS
from radixlm.entrypoints.http.not_implemented import UNBUILT
from radixlm.entrypoints.http.openapi.document import MODELS
from radixlm.entrypoints.request_model import Body, table_fields, with_fields
from radixlm.wire.fields import Field
from radixlm.wire.sampling_params import MAX_INT

HEAD = """# HTTP API

Written by `python -m radixlm.entrypoints.http.openapi.docs docs/api.md` from the routes
themselves; the same facts are served at `/openapi.json`.

- Bodies are JSON. A field that is not listed is refused with a 400 that names it.
- Errors have OpenAI's form `{"error": {"message", "type", "param", "code"}}`; `/v1/messages`
  answers in Anthropic's form and `/api/*` in Ollama's. In mid-stream an error is an event.
- With `--api-key`, send `Authorization: Bearer KEY` (or `x-api-key: KEY`). *Open* routes need none;
  *admin* routes need `--admin-api-key` where there is one, and are closed without any key unless
  the server listens on loopback only.
- A JSON schema's objects hold the properties it declares and no others, and its lists the items of
  `prefixItems` and no more, unless it says otherwise (`additionalProperties`, `items`).
- Hidden states of `/generate` are an entry a step: the rows of the prompt as a list, then a row a
  token; OpenAI's routes give the row of the last place, in streams with the last chunk.
- `X-Request-Id` is taken over from the request or drawn, and sent with every answer.
- 429 and 503 carry `Retry-After`.
- `/v1/responses` runs tools itself where the operator names MCP servers: `--tool-server
  calc=http://host:port/mcp`, and in the request `{"type": "mcp", "server_label": "calc",
  "require_approval": "never"}`. A request cannot bring an address of its own. `web_search` and
  `code_interpreter` mean the servers labelled `browser` and `python`.
- Answers of `/v1/responses` are kept in memory, in SQLite or in Redis (`--response-store`).
- Pages of other origins may call the server as `--cors-allowed-origins` says.
"""
_TITLES = {
    "health": "Health",
    "info": "Information",
    "native": "Native generation",
    "openai": "OpenAI: chat and completions",
    "responses": "OpenAI: responses",
    "pooled": "Embeddings, scores, ranks",
    "batches": "Files and batches",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "admin": "Administration",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
SAMPLING = with_fields("sampling_params")(Body)
_METHODS = ("get", "post", "put", "delete", "head")


def render() -> str:
    """The whole page."""
    document = bare_app().openapi()
    parts = [HEAD]
    for tag, title in _TITLES.items():
        parts.append(f"## {title}\n")
        parts.append("\n".join(_routes(document, tag)) + "\n")
    parts.append("## Routes whose feature is not built\n\nThey answer 501 and say why.\n")
    parts.append("\n".join(_unbuilt()) + "\n")
    parts.append("## Fields\n")
    parts.append("\n".join(_parameters()) + "\n")
    for name in sorted(_models(document)):
        parts.append("\n".join(_fields(document, name)) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def main(argv: list[str]) -> None:
    """Print the page, or write it to a file."""
    if argv:
        Path(argv[0]).write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")


def _routes(document: Mapping[str, Any], tag: str) -> Iterator[str]:
    yield "| route | access | body | what it does |\n|---|---|---|---|"
    for path, operations in document["paths"].items():
        for method in _METHODS:
            operation = operations.get(method)
            if operation is None or tag not in operation.get("tags", ()):
                continue
            access = "open" if path in OPEN_PATHS else "admin" if path in ADMIN_PATHS else ""
            body = _body_name(operation)
            shown = f"[{body}](#{body.lower()})" if body else ""
            text = _line(operation.get("description", ""))
            yield f"| `{method.upper()} {path}` | {access} | {shown} | {text} |"


def _body_name(operation: Mapping[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    name: str = schema.get("$ref", "").rpartition("/")[2]
    return name


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _unbuilt() -> Iterator[str]:
    yield "| route | why |\n|---|---|"
    for path, methods, why in UNBUILT:
        yield f"| `{', '.join(methods)} {path}` | {why} |"


def _models(document: Mapping[str, Any]) -> set[str]:
    names = {
        _body_name(operation)
        for operations in document["paths"].values()
        for operation in operations.values()
    }
    return names & set(document["components"]["schemas"])


def _parameters() -> Iterator[str]:
    """``sampling_params`` of /generate, and the names of the parameters in the other APIs."""
    yield "### Sampling parameters\n\n`sampling_params` of `/generate`, and where else they are.\n"
    yield "| parameter | type | default | other APIs |\n|---|---|---|---|"
    for name, field in table_fields("sampling_params").items():
        if field.state != "works":
            yield f"| `{name}` |  |  | refused: {_line(field.reason)} |"
            continue
        described: Any = SAMPLING.model_json_schema()["properties"][name]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        yield f"| `{name}` | {_type(described)} | `{default}` | {_other_names(field)} |"


def _other_names(field: Field) -> str:
    """The APIs that have a parameter, with its name there if it differs."""
    apis = (api for api in field.names if api not in ("sampling_params", "checkpoint"))
    return ", ".join(
        api if field.names[api] == field.name else f"{api} `{field.names[api]}`" for api in apis
    )


def _fields(document: Mapping[str, Any], name: str) -> Iterator[str]:
    schema = document["components"]["schemas"][name]
    yield f"### {name}\n\n{_line(schema.get('description', ''))}\n"
    yield "| field | type | default | state |\n|---|---|---|---|"
    required = schema.get("required", ())
    for field, described in schema.get("properties", {}).items():
        default = "required" if field in required else f"`{described.get('default')}`"
        state = _state(name, field)
        yield f"| `{field}` | {_type(described)} | {default} | {state} |"


def _state(record: str, name: str) -> str:
    model = MODELS.get(record)
    field = table_fields(model.api).get(name) if model is not None else None
    if field is None or field.state == "works":
        return "works"
    if field.state == "ignored":
        return "accepted, without effect"
    return f"refused: {_line(field.reason)}"


def _type(described: Mapping[str, Any]) -> str:
    """One JSON type, or several, with the bounds of a number."""
    if any(key in described for key in _BOUNDS):
        plain = {key: value for key, value in described.items() if key not in _BOUNDS}
        bounds = [
            f"{sign} {described[key]:g}"
            for key, sign in _BOUNDS.items()
            if abs(described.get(key, MAX_INT)) < MAX_INT
        ]
        return " ".join([_type(plain), ", ".join(bounds)]).rstrip()
    if "$ref" in described:
        return str(described["$ref"]).rpartition("/")[2]
    for key in ("anyOf", "oneOf"):
        if key in described:
            kinds = dict.fromkeys(_type(option) for option in described[key])
            return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in described:
        return " or ".join(f"`{value}`" for value in described["enum"])
    if "const" in described:
        return f"`{described['const']}`"
    kind = str(described.get("type", "any"))
    if kind == "array":
        return f"list of {_type(described.get('items', {}))}"
    return kind


if __name__ == "__main__":
    main(sys.argv[1:])
