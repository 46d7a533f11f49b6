"""Vertex AI's prediction route. SageMaker's are /ping and /invocations."""

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.env import VERTEX_ROUTE
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.native.generate import answer_generate
from radixlm.entrypoints.http.openapi.response_schemas import PREDICTIONS
from radixlm.entrypoints.http.transport import read_json

_PROMPTS = ("text", "input_ids", "input_embeds")

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["instances"],
                    "properties": {
                        "instances": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "object"},
                        },
                        "parameters": {"type": ["object", "null"]},
                    },
                    "example": {
                        "instances": [{"text": "The"}],
                        "parameters": {"max_new_tokens": 4},
                    },
                }
            }
        },
    }
}


def vertex_router() -> APIRouter:
    """The route that AIP_PREDICT_ROUTE names."""
    router = APIRouter(tags=["native"])
    router.add_api_route(
        VERTEX_ROUTE.get(),
        vertex_generate,
        methods=["POST"],
        openapi_extra=_BODY,
        responses={200: {"content": {"application/json": {"schema": PREDICTIONS}}}},
    )
    return router


async def vertex_generate(request: Request) -> Response:
    """``instances`` as prompts of /generate, ``parameters`` as its sampling parameters."""
    body = await read_json(request)
    instances = body.get("instances")
    if not isinstance(instances, list) or not instances:
        raise InvalidRequest("instances must be a list of prompts", "instances")
    kinds = {k for one in instances for k in _PROMPTS if isinstance(one, dict) and k in one}
    if len(kinds) != 1 or not all(isinstance(one, dict) for one in instances):
        raise InvalidRequest(f"instances must all hold one of {', '.join(_PROMPTS)}", "instances")
    (kind,) = kinds
    if not all(kind in one for one in instances):
        raise InvalidRequest(f"instances must all hold {kind}", "instances")
    if any(one.get("image_data") for one in instances):
        raise InvalidRequest("instances: image_data is not supported on this route", "instances")
    unknown = set(body) - {"instances", "parameters"}
    if unknown:
        raise InvalidRequest(f"unknown field {sorted(unknown)[0]!r}", sorted(unknown)[0])
    native = {kind: [one[kind] for one in instances], "stream": False}
    answer = await answer_generate(
        request, native | {"sampling_params": body.get("parameters") or {}}
    )
    return json_response({"predictions": orjson.loads(bytes(answer.body))})
