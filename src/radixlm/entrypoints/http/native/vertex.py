"""Vertex AI's prediction route. SageMaker's are /ping and /invocations."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.env import VERTEX_ROUTE
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.native.generate import answer_generate
from radixlm.entrypoints.http.openapi.response_schemas import PREDICTIONS
from radixlm.entrypoints.http.transport import read_json
from radixlm.entrypoints.native.request import GenerateBody
from radixlm.wire.unknown import note_unknown

_PROMPTS = ("text", "input_ids", "input_embeds")
_MEDIA = ("image_data", "video_data", "audio_data")

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
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
    """``instances`` as prompts of /generate; ``parameters`` as its other fields, among which
    sampling parameters may stand without ``sampling_params``."""
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
    for name in sorted(set(body) - {"instances", "parameters"}):
        note_unknown(name)
    native = {kind: [one[kind] for one in instances]} | _fields(body.get("parameters"))
    for name in _MEDIA:
        if any(one.get(name) for one in instances):
            native[name] = [one.get(name) for one in instances]
    answer = await answer_generate(request, native | {"stream": False})
    return json_response({"predictions": orjson.loads(bytes(answer.body))})


def _fields(parameters: Any) -> dict[str, Any]:
    """The fields of /generate that ``parameters`` holds."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be an object", "parameters")
    known = GenerateBody.model_fields
    fields = {name: value for name, value in parameters.items() if name in known}
    plain = {name: value for name, value in parameters.items() if name not in known}
    sampling = fields.get("sampling_params")
    if plain and isinstance(sampling, dict | None):
        fields["sampling_params"] = plain | (sampling or {})
    return fields
