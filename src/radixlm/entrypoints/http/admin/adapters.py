"""Operator routes that load and unload LoRA adapters, under SGLang's names and vLLM's."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body
from radixlm.lora.registry import AdapterRegistry

router = APIRouter(tags=["admin"])


class LoadLoraAdapter(Body):
    """``lora_path``: a folder of the server. ``load_inplace``: replace a loaded one of this name,
    which serves its requests to their end."""

    lora_name: str
    lora_path: str
    pinned: bool = False
    load_inplace: bool = False


class LoadLoraAdapterFromTensors(Body):
    """``config_dict``: adapter_config.json. ``serialized_named_tensors``: a safetensors file in
    base64; in a list, the same for each rank."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: str | list[str]
    load_format: str | None = "safetensors"
    pinned: bool = False
    load_inplace: bool = False
    added_tokens_config: dict[str, Any] | None = None


class UnloadLoraAdapter(Body):
    lora_name: str


@router.post("/load_lora_adapter", openapi_extra=documented(LoadLoraAdapter))
@router.post(
    "/v1/load_lora_adapter", openapi_extra=documented(LoadLoraAdapter), operation_id="v1_load_lora"
)
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter; answers when requests may use it."""
    body = await read_body(request, LoadLoraAdapter, any_type=True)
    adapters = state_of(request).intake.adapters
    work = adapters.load(body.lora_name, body.lora_path, body.pinned, body.load_inplace)
    return await answer(adapters, work)


@router.post(
    "/load_lora_adapter_from_tensors", openapi_extra=documented(LoadLoraAdapterFromTensors)
)
async def load_lora_adapter_from_tensors(request: Request) -> Response:
    """Load an adapter whose tensors are in the body; pickles are not read."""
    body = await read_body(request, LoadLoraAdapterFromTensors, any_type=True)
    adapters = state_of(request).intake.adapters

    async def work() -> None:
        tensors = await asyncio.to_thread(_decoded, body)
        name, config = body.lora_name, body.config_dict
        await adapters.load_bytes(name, config, tensors, body.pinned, body.load_inplace)

    return await answer(adapters, work())


def _decoded(body: LoadLoraAdapterFromTensors) -> bytes:
    """The bytes of the safetensors file; InvalidRequest for other formats."""
    key, texts = "serialized_named_tensors", body.serialized_named_tensors
    if body.added_tokens_config:
        raise InvalidRequest("added_tokens_config: adapters that add no tokens work; send null")
    if body.load_format not in (None, "safetensors"):
        raise InvalidRequest(
            f"load_format: {body.load_format!r:.40} is not read, since it may run code; what "
            f"works: 'safetensors', with a safetensors file in base64 as {key}",
            "load_format",
        )
    one, *others = {texts} if isinstance(texts, str) else dict.fromkeys(texts) or [""]
    if others:
        raise InvalidRequest(f"{key}: send the whole tensors, the same for each rank", key)
    try:
        return base64.b64decode(one, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{key}: send a safetensors file in base64 ({error})", key) from error


@router.post("/unload_lora_adapter", openapi_extra=documented(UnloadLoraAdapter))
@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=documented(UnloadLoraAdapter),
    operation_id="v1_unload_lora",
)
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter; answers when its last request is over."""
    body = await read_body(request, UnloadLoraAdapter, any_type=True)
    adapters = state_of(request).intake.adapters
    return await answer(adapters, adapters.unload(body.lora_name))


async def answer(adapters: AdapterRegistry, work: Coroutine[Any, Any, None]) -> Response:
    """What both routes answer, in the form of the reference."""
    message, status = "", 200
    try:
        await work
    except RequestError as error:
        message, status = str(error), error.status
    return json_response(outcome(adapters, message), status)


def outcome(adapters: AdapterRegistry, message: str = "") -> dict[str, Any]:
    """Whether it worked, why not, and the adapters that are loaded now."""
    return {
        "success": not message,
        "error_message": message,
        "loaded_adapters": adapters.loaded,
    }
