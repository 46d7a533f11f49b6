"""Vectors and scores of prompts: /encode, /classify, /v1/embeddings, /v1/classify."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.arch.media.spec import Modality
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.off_loop import off_loop
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.conversation import Conversation, check_input, prompt_of
from radixlm.entrypoints.http.pooling.overrides import VectorsOfInputs, read_overrides
from radixlm.entrypoints.http.pooling.packed import (
    ByteOrder,
    NumberFormat,
    bytes_response,
    packed,
)
from radixlm.entrypoints.http.pooling.pool import (
    Limit,
    MultimodalPrompt,
    Pair,
    PoolingResult,
    Prompt,
    as_prompts,
    checked_limit,
    normalized,
    normalizes,
    pool,
    pool_of,
    probabilities,
    prompt_usage,
    require_score_head,
    truncate,
)
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body, read_json
from radixlm.entrypoints.media import MediaSource, media_of
from radixlm.entrypoints.native.response import finish_reason
from radixlm.entrypoints.request_model import (
    Body,
    Ints,
    Priority,
    Rid,
    Strings,
    reject_unsupported,
    with_fields,
)

router = APIRouter(tags=["pooled"])

BYTES_A_ROW = 1 << 10  # what a row costs to show, as bytes of a body


class TextInput(Body):
    """An input as an object: a text, an image (URL, data URI, base64), a video, or of these
    together what a user would send."""

    text: str | None = None
    image: str | None = None
    video: str | None = None


class Pooled(Conversation):
    """What the routes have in common. ``truncate_prompt_tokens``: as in vLLM."""

    model: str | None = None
    user: str | None = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None
    lora_path: str | None = None
    truncate_prompt_tokens: Limit | None = None


@with_fields("embeddings")
class EmbeddingRequest(Pooled):
    """POST /v1/embeddings: of ``input``, or of vLLM's ``messages``, a conversation. ``embed_dtype``
    and ``endianness`` of vLLM: the numbers of base64 and bytes. ``use_activation``: whether vectors
    are normalized; what the model does itself unless given."""

    input: str | Ints | Strings | list[Ints] | list[str | TextInput] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    embed_dtype: NumberFormat | None = None
    endianness: ByteOrder | None = None
    use_activation: bool | None = None
    embed_override_token_id: int | None = None
    embed_overrides: VectorsOfInputs | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling, vLLM's: vectors, or the probabilities of a score head (with
    ``use_activation`` false its scores). The tasks ``token_embed`` (vectors of length 1, unless
    ``use_activation`` is false) and ``token_classify``: a row for each token."""

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None


class ClassifyRequest(Pooled):
    """POST /v1/classify: ``input``, or a conversation. With ``use_activation`` false ``probs`` has
    the scores as they are."""

    input: str | Ints | Strings | list[Ints] | None = None
    use_activation: bool | None = None


@with_fields("encode")
class EncodeRequest(Body):
    """POST /encode and /classify. With ``is_cross_encoder_request`` the texts are pairs.
    ``lora_path``: an adapter's name, or one for each prompt (null: none)."""

    text: str | Strings | list[Strings] | None = None
    input_ids: Ints | list[Ints] | None = None
    rid: Rid | list[Rid] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    priority: Priority | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    is_cross_encoder_request: bool = False
    return_pooled_hidden_states: bool = False
    lora_path: str | list[str | None] | None = None
    embed_override_token_id: int | None = None
    embed_overrides: VectorsOfInputs | None = None


@router.post("/v1/embeddings", openapi_extra=documented(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """Vectors of texts and images."""
    body = await read_body(request, EmbeddingRequest)
    answer = answer_embeddings(state_of(request), body)
    return await _response(body, await cancel_on_disconnect(request, answer), "embedding")


@router.post("/pooling", openapi_extra=documented(PoolingRequest))
async def pooling(request: Request) -> Response:
    """Vectors, or the probabilities of a score head, in the form of vLLM."""
    body = await read_body(request, PoolingRequest)
    answer = answer_pooling(state_of(request), body)
    return await _response(body, await cancel_on_disconnect(request, answer), "data")


async def _response(body: EmbeddingRequest, answer: dict[str, Any], name: str) -> Response:
    """JSON, or vLLM's form in bytes."""
    if body.encoding_format not in ("bytes", "bytes_only"):
        return await json_answer(answer)
    numbers, order = body.embed_dtype or "float32", body.endianness or "native"
    args = answer, name, numbers, order, body.encoding_format == "bytes"
    return await off_loop(
        4 * sum(_size(row[name]) for row in answer["data"]), bytes_response, *args
    )


def _size(shown: list[float] | list[list[float]]) -> int:
    """Numbers of a vector or of rows."""
    return sum(len(row) if isinstance(row, list) else 1 for row in shown)


async def answer_pooling(state: ServerState, body: PoolingRequest) -> dict[str, Any]:
    gives_scores = pool_of(state).gives == "scores"
    tasks = ("classify", "score", "token_classify") if gives_scores else ("embed", "token_embed")
    if body.task not in (None, *tasks):
        known = " and ".join(tasks)
        raise InvalidRequest(f"Unsupported task: {body.task!r}; this model does {known}", "task")
    if body.task == "token_embed" and body.use_activation is None:
        body = body.model_copy(update={"use_activation": True})
    activates = gives_scores and body.use_activation is not False
    answer = await answer_embeddings(state, body, activates)
    data = [{"object": "pooling", "index": one["index"], "data": one["embedding"]}
            for one in answer["data"]]  # fmt: skip
    return answer | {"id": answer["id"].replace("embd", "pool"), "data": data}


async def answer_embeddings(
    state: ServerState, body: EmbeddingRequest, activates: bool = False
) -> dict[str, Any]:
    """The whole answer, for bytes with floats. ``activates``: scores as probabilities."""
    reject_unsupported(body)
    model = state.check_model(body.model)
    scales = normalizes(state, body.use_activation)
    data = []
    results = await _pool(state, body, body.input, body.prompt_name)
    for index, one in enumerate(results):
        args = state, body, one, activates, scales
        shown = await off_loop(BYTES_A_ROW * len(one.rows or ()), _shown, *args)
        data.append({"object": "embedding", "index": index, "embedding": shown})
    return {
        "id": f"embd-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "data": data,
        "model": model,
        "usage": prompt_usage(results),
    }


def _shown(
    state: ServerState,
    body: EmbeddingRequest,
    result: PoolingResult,
    activates: bool,
    scales: bool,
) -> list[float] | list[list[float]] | str:
    """The vector of a result, or its rows, as the body asks for them."""

    def finished(vector: list[float]) -> list[float]:
        vector = probabilities(state, vector) if activates else vector
        vector = truncate(state, vector, body.dimensions, body.use_activation is False)
        return normalized(vector) if scales else vector

    rows = result.rows
    shown = finished(result.vector) if rows is None else [finished(row) for row in rows]
    if body.encoding_format == "base64":
        return packed(shown, body.embed_dtype or "float32", body.endianness or "native")
    return shown


async def _pool(
    state: ServerState, body: Pooled, value: Any, prompt_name: str | None = None
) -> list[PoolingResult]:
    """What comes of ``value``, the field ``input``, or of ``messages``."""
    check_input(state, body, value)
    adapter, priority = state.adapter_of(body.model, body.lora_path), body.priority
    limit = checked_limit(state, body.truncate_prompt_tokens)
    if value is None:
        pool_of(state)  # before the template is asked for
        param, prompts = "messages", [await prompt_of(state, body, limit is not None)]
    else:
        param, inputs = "input", list[Any](as_prompts(value, "input"))
        prompts = [
            _input_of(state, one, f"input[{i}]") if isinstance(one, TextInput) else one
            for i, one in enumerate(inputs)
        ]
    adds = body.add_special_tokens is not False
    overrides, per_token = None, isinstance(body, PoolingRequest) and _wants_rows(state, body)
    if isinstance(body, EmbeddingRequest):
        token, vectors = body.embed_override_token_id, body.embed_overrides
        overrides = read_overrides(state, token, vectors, len(prompts))
    return await pool(
        state, prompts, param, body.rid, priority, prompt_name, adapter, limit, False, adds,
        overrides, per_token, getattr(body, "use_activation", None) is False,
    )  # fmt: skip


def _wants_rows(state: ServerState, body: PoolingRequest) -> bool:
    """Whether a row for each token is asked for, or is what the model gives."""
    if body.task is None:
        return pool_of(state).scores_tokens
    return body.task in ("token_embed", "token_classify")


def _input_of(state: ServerState, one: TextInput, where: str) -> Prompt:
    """A vision-language model gets objects through its chat template; texts stay as they are."""
    named: tuple[tuple[Modality, str | None], ...] = (("image", one.image), ("video", one.video))
    sources = tuple(MediaSource(value, f"{where}.{kind}", kind) for kind, value in named if value)
    if not sources and one.text is None:
        raise InvalidRequest(f"{where}: needs a text, an image or a video", where)
    writes = state.media is not None and not state.media.embeds_images
    if one.text is not None and not sources and not writes:
        return one.text
    return MultimodalPrompt(one.text, sources)


@router.post("/v1/classify", openapi_extra=documented(ClassifyRequest))
async def classify_v1(request: Request) -> Response:
    """Classify texts; with the probabilities of all classes."""
    body = await read_body(request, ClassifyRequest)
    work = answer_classify(state_of(request), body)
    return json_response(await cancel_on_disconnect(request, work))


async def answer_classify(state: ServerState, body: ClassifyRequest) -> dict[str, Any]:
    """The whole answer. InvalidRequest where the model has no classes of texts."""
    model = state.check_model(body.model)
    if require_score_head(state).scores_tokens:
        raise InvalidRequest("this model gives classes of tokens, not of texts: ask /pooling")
    results = await _pool(state, body, body.input)
    return {
        "id": f"classify-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            _class(state, index, one.vector, body.use_activation is not False)
            for index, one in enumerate(results)
        ],
        "usage": prompt_usage(results),
    }


def _class(state: ServerState, index: int, scores: list[float], activates: bool) -> dict[str, Any]:
    probs = probabilities(state, scores) if activates else scores
    labels = pool_of(state).labels
    best = probs.index(max(probs))
    label = labels[best] if best < len(labels) else f"LABEL_{best}"
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


def _native(path: str, has_scores: bool) -> None:
    async def answer(request: Request) -> Response:
        if has_scores and not {"input", "messages"}.isdisjoint(await read_json(request)):
            return await classify_v1(request)
        body = await read_body(request, EncodeRequest, any_type=True)
        state = state_of(request)
        if has_scores:
            require_score_head(state)
        return json_response(await cancel_on_disconnect(request, answer_encode(state, body)))

    scores = "Scores of prompts; `input` or `messages` in the form of vLLM, as of /v1/classify."
    answer.__doc__ = scores if has_scores else "Vectors of prompts."
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


def _with_media(body: EncodeRequest, prompts: list[Prompt], is_list: bool) -> list[Prompt]:
    """The prompts with their media, in the fields of /generate."""
    made = []
    for index, prompt in enumerate(prompts):
        sources = tuple(media_of(body, index, is_list))
        if sources and not isinstance(prompt, str):
            raise InvalidRequest(f"{sources[0].where} needs texts", sources[0].where)
        made.append(MultimodalPrompt(str(prompt), sources, True) if sources else prompt)
    return made


async def answer_encode(state: ServerState, body: EncodeRequest) -> Any:
    """A list of answers for a list of prompts, else one."""
    reject_unsupported(body)
    if body.text is None and body.input_ids is None and body.image_data:
        body = body.model_copy(update={"text": ""})
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("exactly one of text and input_ids must be given", "text")
    value = body.input_ids if body.text is None else body.text
    param = "input_ids" if body.text is None else "text"
    if body.is_cross_encoder_request:
        require_score_head(state)
        prompts, is_list = _pairs(body.text)
    else:
        prompts = as_prompts(value, param)
        if any(isinstance(one, list) and one and isinstance(one[0], str) for one in prompts):
            raise InvalidRequest("text: pairs need is_cross_encoder_request", "text")
        is_list = isinstance(value, list) and not isinstance(value[0], int)
    priority = body.priority
    prompts = _with_media(body, prompts, is_list)
    adapter, with_hidden = body.lora_path, body.return_pooled_hidden_states
    token, vectors = body.embed_override_token_id, body.embed_overrides
    results = await pool(
        state, prompts, param, body.rid, priority, body.prompt_name, adapter, None, with_hidden,
        overrides=read_overrides(state, token, vectors, len(prompts)),
    )  # fmt: skip
    answers = [_native_answer(state, one, body.dimensions) for one in results]
    return answers if is_list else answers[0]


def _pairs(value: str | list[str] | list[list[str]] | None) -> tuple[list[Prompt], bool]:
    """Pairs of texts: one, or a list of them."""
    if isinstance(value, list) and value:
        is_list = not isinstance(value[0], str)
        rows: list[Any] = value if is_list else [value]
        if all(isinstance(row, list) and len(row) == 2 for row in rows):
            return [Pair(row[0], row[1]) for row in rows], is_list
    raise InvalidRequest("text: a cross-encoder request needs pairs of texts", "text")


def _native_answer(
    state: ServerState, one: PoolingResult, dimensions: int | None
) -> dict[str, Any]:
    output = one.output
    meta = {
        "id": output.rid,
        "finish_reason": finish_reason(output.finish, 0),
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "weight_version": state.weight_version,
    }
    answer = {"embedding": truncate(state, one.vector, dimensions), "meta_info": meta}
    return answer if one.hidden is None else answer | {"pooled_hidden_state": one.hidden}
