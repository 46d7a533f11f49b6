"""Vectors and scores of whole prompts: /encode, /classify, /v1/embeddings, /v1/classify."""

from __future__ import annotations

import base64
import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.body import read_body
from radixlm.entrypoints.http.client import client_key
from radixlm.entrypoints.http.disconnect import until_gone
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openai import run
from radixlm.entrypoints.http.openai.sampling import encode
from radixlm.entrypoints.http.schema import Body, Int, Ints, Priority, Rid, Strings, documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.native import finish_reason
from radixlm.intake.records import GenerateRequest, Output
from radixlm.wire.sampling_params import SamplingParams

router = APIRouter(tags=["pooled"])

MAX_INPUTS = 2048
_HEADS = ("SequenceClassification", "RewardModel")
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    input: str | Ints | Strings | list[Ints]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    user: str | None = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None


class ClassifyRequest(Body):
    """POST /v1/classify."""

    input: str | Ints | Strings | list[Ints]
    model: str | None = None
    user: str | None = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None


class EncodeRequest(Body):
    """POST /encode and /classify."""

    text: str | Strings | None = None
    input_ids: Ints | list[Ints] | None = None
    rid: Rid | list[Rid] | None = None
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    priority: Priority | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    sampling_params: Any = None
    modalities: Any = None
    is_cross_encoder_request: bool = False
    log_metrics: bool = True
    background: bool = False


@dataclass(frozen=True, slots=True)
class Pooled:
    """One prompt's vector, and what the request cost."""

    vector: list[float]
    output: Output


def pooling_of(folder: Path) -> str:
    """How a folder in sentence-transformers' form wants its vectors; the last token's, at unit
    length, for all others."""
    path = folder / "1_Pooling" / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        modules = (folder / "modules.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "last+norm"
    mode = next((kind for name, kind in _MODES.items() if config.get(name)), "last")
    return f"{mode}+norm" if "Normalize" in modules else mode


def has_head(state: ServerState) -> bool:
    """Whether the model ends in scores instead of words."""
    return any(head in state.info.architecture for head in _HEADS)


def need_head(state: ServerState) -> None:
    """InvalidRequest unless the model has a score head."""
    if not has_head(state):
        raise InvalidRequest(
            f"{state.info.architecture} has no score head: serve a model for sequence "
            "classification or rewards"
        )


def as_prompts(value: Any, param: str) -> list[str | list[int]]:
    """One prompt or several, of text or of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{param} must be a text, token ids or a list of them", param)
    prompts: list[Any] = [value] if isinstance(value[0], int) else value
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequest(f"{param}: at most {MAX_INPUTS} inputs a call", param)
    return prompts


async def pool(
    state: ServerState,
    prompts: Sequence[str | list[int]],
    pooling: str,
    param: str = "input",
    rid: str | list[str] | None = None,
    priority: int = 0,
) -> list[Pooled]:
    """The vectors of ``prompts``, in order. Errors name ``param``."""
    if isinstance(rid, list) and len(rid) != len(prompts):
        raise InvalidRequest(f"rid has {len(rid)} entries for {len(prompts)} inputs", "rid")
    requests = []
    for index, prompt in enumerate(prompts):
        ids = await encode(state, prompt, param) if isinstance(prompt, str) else prompt
        bad = next((i for i in ids if not 0 <= i < state.intake.facts.vocab), None)
        if bad is not None or not ids:
            what = "it has no tokens" if bad is None else f"{bad} is not a token id"
            raise InvalidRequest(f"{param}[{index}]: {what}", param)
        name = rid[index] if isinstance(rid, list) else rid
        if name is not None and not isinstance(rid, list) and len(prompts) > 1:
            name = f"{name}_{index}"
        requests.append(
            GenerateRequest(
                sampling=SamplingParams(max_new_tokens=0),
                input_ids=ids,
                pooling=pooling,
                rid=name,
                priority=priority,
                fair_key=client_key(),
            )
        )
    results = await run.collect(state, requests)
    return [_pooled(outputs[0]) for outputs in results]


def _pooled(output: Output) -> Pooled:
    if output.pooled is None:
        raise InvalidRequest("the engine gave no vector for this prompt")
    return Pooled(output.pooled, output)


def cut(vector: list[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` numbers, at unit length again."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise InvalidRequest(
            f"dimensions: {dimensions} is more than the model's {len(vector)}", "dimensions"
        )
    short = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in short)) or 1.0
    return [x / length for x in short]


@router.post("/v1/embeddings", openapi_extra=documented(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """Vectors of texts."""
    body = await read_body(request, EmbeddingRequest)
    return json_response(await until_gone(request, answer_embeddings(state_of(request), body)))


async def answer_embeddings(state: ServerState, body: EmbeddingRequest) -> dict[str, Any]:
    """The whole answer."""
    model = state.check_model(body.model)
    prompts = as_prompts(body.input, "input")
    pooling = pooling_of(state.info.folder)
    found = await pool(state, prompts, pooling, "input", body.rid, body.priority or 0)
    data = []
    for index, one in enumerate(found):
        vector: Any = cut(one.vector, body.dimensions)
        if body.encoding_format == "base64":
            vector = base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    return {"object": "list", "data": data, "model": model, "usage": prompt_usage(found)}


def prompt_usage(found: Sequence[Pooled]) -> dict[str, int]:
    """Usage of a call that generates nothing."""
    count = sum(one.output.prompt_tokens for one in found)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


@router.post("/v1/classify", openapi_extra=documented(ClassifyRequest))
async def classify_v1(request: Request) -> Response:
    """Classes of texts, with their probabilities."""
    body = await read_body(request, ClassifyRequest)
    state = state_of(request)
    model = state.check_model(body.model)
    need_head(state)
    prompts = as_prompts(body.input, "input")
    work = pool(state, prompts, "last+head", "input", body.rid, body.priority or 0)
    found = await until_gone(request, work)
    return json_response(
        {
            "id": f"classify-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [_class(index, one.vector) for index, one in enumerate(found)],
            "usage": prompt_usage(found),
        }
    )


def _class(index: int, scores: list[float]) -> dict[str, Any]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    probs = [weight / sum(weights) for weight in weights]
    label = f"LABEL_{probs.index(max(probs))}"
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


def _native(path: str, has_scores: bool) -> None:
    async def answer(request: Request) -> Response:
        body = await read_body(request, EncodeRequest, any_type=True)
        state = state_of(request)
        _refuse_media(body)
        if has_scores:
            need_head(state)
        return json_response(await until_gone(request, _encode(state, body, has_scores)))

    answer.__doc__ = "Scores of prompts." if has_scores else "Vectors of prompts."
    for method in ("POST", "PUT"):
        router.add_api_route(
            path,
            answer,
            methods=[method],
            name=path.strip("/"),
            operation_id=f"{method.lower()}_{path.strip('/')}",
            openapi_extra=documented(EncodeRequest),
            response_class=Response,
        )


_native("/encode", has_scores=False)
_native("/classify", has_scores=True)


def _refuse_media(body: EncodeRequest) -> None:
    for name in ("image_data", "video_data", "audio_data"):
        if getattr(body, name):
            raise InvalidRequest(f"{name}: this model reads text only", name)
    if body.lora_path:
        raise InvalidRequest("lora_path: adapters are not built (--enable-lora)", "lora_path")
    if body.is_cross_encoder_request:
        raise InvalidRequest(
            "is_cross_encoder_request: cross encoders are not built", "is_cross_encoder_request"
        )


async def _encode(state: ServerState, body: EncodeRequest, has_scores: bool) -> Any:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("exactly one of text and input_ids must be given", "text")
    value = body.input_ids if body.text is None else body.text
    param = "input_ids" if body.text is None else "text"
    prompts = as_prompts(value, param)
    pooling = "last+head" if has_scores else pooling_of(state.info.folder)
    found = await pool(state, prompts, pooling, param, body.rid, body.priority or 0)
    answers = [_native_answer(state, one, body.dimensions) for one in found]
    is_list = isinstance(value, list) and not isinstance(value[0], int)
    return answers if is_list else answers[0]


def _native_answer(state: ServerState, one: Pooled, dimensions: int | None) -> dict[str, Any]:
    output = one.output
    meta = {
        "id": output.rid,
        "finish_reason": finish_reason(output.finish, 0),
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "weight_version": state.weight_version,
    }
    return {"embedding": cut(one.vector, dimensions), "meta_info": meta}
