"""The OpenAPI document: FastAPI's, with the bodies, answers and errors of all routes."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from radixlm.entrypoints.http.openapi.response_schemas import (
    ANSWERS,
    EXAMPLES,
    REFUSALS,
    error_name,
    error_schemas,
)
from radixlm.entrypoints.request_model import Body

_REF = "#/components/schemas/{model}"
MODELS: dict[str, type[Body]] = {}


def documented(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is ``model``."""
    MODELS[model.__name__] = model
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made when it is first asked for."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=app.servers or None,
    )
    pairs = [(model, "validation") for model in MODELS.values()]
    _, definitions = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions.get("$defs", {}))
    components.update(error_schemas())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe(path, operation)
            if method == "get" and "post" in operations:
                _add_query(operation, operations["post"], components)
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["components"]["securitySchemes"] = schemes
    document["security"] = [{}, {"bearer": []}]
    app.openapi_schema = document
    return document


def _describe(path: str, operation: dict[str, Any]) -> None:
    """Add the answers, the errors and an example of the body of a route."""
    answers = ANSWERS.get(path)
    if answers is not None:
        content = {kind: {"schema": schema} for kind, schema in answers.items()}
        described = {"description": "The answer"}
        operation["responses"] = {"200": described | ({"content": content} if content else {})}
    ref = {"schema": {"$ref": _REF.format(model=error_name(path))}}
    errors: dict[str, Any] = {"application/json": ref}
    if path in REFUSALS:
        errors["application/json"] = {"schema": {"anyOf": [ref["schema"], REFUSALS[path]]}}
    if path == "/flush_cache":
        errors["text/plain"] = {"schema": {"type": "string"}}
    operation["responses"].pop("422", None)
    operation["responses"]["default"] = {"description": "An error", "content": errors}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        name = body["schema"].get("$ref", "").rpartition("/")[2]
        example = EXAMPLES.get(name) or body["schema"].get("example")
        if example is not None:
            body["example"] = example


def _add_query(get: dict[str, Any], post: dict[str, Any], components: dict[str, Any]) -> None:
    """A GET that equals the POST takes the fields of the body in its query."""
    content = post.get("requestBody", {}).get("content", {}).get("application/json", {})
    record = components.get(content.get("schema", {}).get("$ref", "").rpartition("/")[2])
    if record is None:
        return
    if get.get("parameters"):
        return  # another route, with its own query
    required = record.get("required", ())
    get["parameters"] = [
        {"name": name, "in": "query", "required": name in required, "schema": schema}
        for name, schema in record.get("properties", {}).items()
    ]
