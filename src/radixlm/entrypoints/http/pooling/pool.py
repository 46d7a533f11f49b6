"""Texts, token ids and pairs of texts -> vectors or scores: what all routes of models that do not
generate have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.arch.sentence_transformers import SentenceTransformersConfig
from radixlm.arch.spec import Pool
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.middleware import fair_share_key
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.media import MediaSource
from radixlm.intake.records import GenerateRequest, Output
from radixlm.multimodal.processor import Prompt as SeenPrompt
from radixlm.wire.requests import PoolingParams
from radixlm.wire.sampling_params import SamplingParams

MAX_INPUTS = 2048
# what clients of the reference send beside an image for want of a text
_NO_TEXT = (None, "", "padding")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that the model reads together: a query and a document."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    """Media, with a text or without. ``is_written``: the text is a prompt whose placeholders the
    client has written; else both are a user's message for the chat template."""

    text: str | None
    sources: tuple[MediaSource, ...]
    is_written: bool = False


Prompt = str | list[int] | Pair | MultimodalPrompt


@dataclass(frozen=True, slots=True)
class Pooled:
    """One prompt's vector or scores, and what the request cost."""

    vector: list[float]
    output: Output


def pool_of(state: ServerState) -> Pool:
    """What the model makes of a text; InvalidRequest for one that generates."""
    pool = state.info.decoder.pool
    if pool is None:
        raise InvalidRequest(
            f"{state.info.architecture} generates text; start the server with --is-embedding to "
            "get vectors from it"
        )
    return pool


def has_scores(state: ServerState) -> bool:
    """Whether the model ends in scores instead of words or a vector."""
    pool = state.info.decoder.pool
    return pool is not None and pool.gives == "scores"


def require_score_head(state: ServerState) -> Pool:
    """The head; InvalidRequest unless the model gives scores."""
    if not has_scores(state):
        raise InvalidRequest(
            f"{state.info.architecture} has no score head: serve a model for sequence "
            "classification or rewards"
        )
    return pool_of(state)


def as_prompts(value: Any, param: str) -> list[Prompt]:
    """One prompt or several: texts, token ids, or objects with a text."""
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
    prompts: Sequence[Prompt],
    param: str = "input",
    rid: str | list[str] | None = None,
    priority: int = 0,
    prompt_name: str | None = None,
) -> list[Pooled]:
    """The vectors or scores of ``prompts``, in order. Errors name ``param``. ``prompt_name``: which
    of the model's own prompts stands before each text."""
    whole = pool_of(state).pooling != "last"
    if isinstance(rid, list) and len(rid) != len(prompts):
        raise InvalidRequest(f"rid has {len(rid)} entries for {len(prompts)} inputs", "rid")
    before = _prompt_text(state.info.sentence, prompt_name)
    requests = []
    for index, prompt in enumerate(prompts):
        where = f"{param}[{index}]"
        ids: list[int] | None = None
        made, first_len = None, 0
        if isinstance(prompt, MultimodalPrompt):
            made = await _seen(state, prompt, where)
        else:
            ids, first_len = await _ids(state, prompt, where, param, before)
        name = rid[index] if isinstance(rid, list) else rid
        if name is not None and not isinstance(rid, list) and len(prompts) > 1:
            name = f"{name}_{index}"
        requests.append(
            GenerateRequest(
                sampling=SamplingParams(max_new_tokens=0),
                input_ids=ids,
                prompt=made,
                pooling=PoolingParams(first_len, whole),
                rid=name,
                priority=priority,
                fair_key=fair_share_key(),
            )
        )
    results = await generate.collect(state, requests)
    return [_pooled(outputs[0]) for outputs in results]


def _pooled(output: Output) -> Pooled:
    if output.pooled is None:
        raise InvalidRequest("the engine gave no vector for this prompt")
    return Pooled(output.pooled, output)


async def _seen(state: ServerState, mm_prompt: MultimodalPrompt, where: str) -> SeenPrompt:
    """The prompt of media; InvalidRequest names the field."""
    reader = state.media
    text, sources = mm_prompt.text, mm_prompt.sources
    if reader is None:
        first = sources[0].where if sources else where
        raise InvalidRequest(f"{first}: this model reads text only", first)
    for one in sources:
        if one.kind not in reader.kinds:
            raise InvalidRequest(f"{one.where}: this model does not read it", one.where)
    if reader.embeds_images:
        if len(sources) != 1 or text not in _NO_TEXT:
            raise InvalidRequest(f"{where}: a vector is of a text or of one image", where)
        return await reader.vector(sources[0])
    if mm_prompt.is_written:
        return await reader.prompt(text or "", sources, True)
    await reader.ready()
    parts: list[dict[str, Any]] = [{"type": one.kind} for one in sources]
    if text:
        parts.append({"type": "text", "text": text})
    template = state.require_template()
    written = template.render([{"role": "user", "content": parts}])
    return await reader.prompt(written, sources, template.adds_special_tokens)


def _prompt_text(sentence: SentenceTransformersConfig | None, name: str | None) -> str:
    """The prompt called ``name``, or the model's default one; "" if there is none."""
    prompts = sentence.prompts if sentence is not None else {}
    if name is not None and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"prompt_name: {name!r:.80} is unknown; known: {known}", "prompt_name")
    name = name or (sentence.default_prompt if sentence is not None else None)
    return prompts.get(name, "") if name else ""


async def _ids(
    state: ServerState, prompt: str | list[int] | Pair, where: str, param: str, before: str
) -> tuple[list[int], int]:
    """Token ids, checked and with --allow-auto-truncate cut to what the model reads; and how many
    of them are of the first text of a pair."""
    first_len = 0
    if isinstance(prompt, Pair):
        ids, first_len = await _pair_ids(state, prompt, param)
    elif isinstance(prompt, str):
        ids = await encode(state, _prepared(state, before + prompt), param)
    else:
        ids = prompt
    facts = state.intake.facts
    if len(ids) > facts.context_len and facts.allow_auto_truncate:
        ids = _cut_tokens(state, ids, facts.context_len)
    looked_at = ids[: facts.context_len]  # intake refuses a longer one
    bad = next((i for i in looked_at if not 0 <= i < facts.vocab), None)
    if bad is not None or not ids:
        what = "it has no tokens" if bad is None else f"{bad} is not a token id"
        raise InvalidRequest(f"{where}: {what}", param)
    return ids, first_len


def _prepared(state: ServerState, text: str) -> str:
    """The text as a sentence-transformers model gets it."""
    sentence = state.info.sentence
    if sentence is None:
        return text
    text = text.strip()
    return text.lower() if sentence.is_lower_case else text


def _cut_tokens(state: ServerState, ids: list[int], most: int) -> list[int]:
    """The first ``most`` ids, of which the last are the special ones that ended the text."""
    closing = set(state.tokenizer.encode("")) if state.tokenizer is not None else set()
    tail = 0
    while tail < most and ids[len(ids) - tail - 1] in closing:
        tail += 1
    return ids[: most - tail] + ids[len(ids) - tail :]


def has_own_template(state: ServerState) -> bool:
    """Whether the checkpoint or --chat-template says how to write a conversation."""
    own = state.tokenizer is not None and state.tokenizer.chat_template() is not None
    return own or state.config.serve.chat_template is not None


async def _pair_ids(state: ServerState, pair: Pair, param: str) -> tuple[list[int], int]:
    """A cross-encoder reads both texts as its tokenizer joins them; a decoder reads them as its
    chat template writes a question and its answer."""
    if state.info.decoder.encoder is None and has_own_template(state) and state.template:
        messages = [
            {"role": "user", "content": pair.first},
            {"role": "assistant", "content": pair.second},
        ]
        text = state.template.render(messages, add_generation_prompt=False)
        return await encode(state, text, param, state.template.adds_special_tokens), 0
    ids, first_len = state.require_tokenizer().encode_pair(pair.first, pair.second)
    return ids, first_len


def cut(state: ServerState, vector: list[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` numbers, at unit length again if the whole vector has it."""
    if dimensions is None or dimensions == len(vector):
        return vector
    pool = pool_of(state)
    if pool.gives == "scores":
        raise InvalidRequest("dimensions: this model gives scores, not vectors", "dimensions")
    if pool.dimensions and dimensions not in pool.dimensions:
        allowed = ", ".join(map(str, pool.dimensions))
        raise InvalidRequest(
            f"dimensions: {dimensions} is none of the model's lengths ({allowed})", "dimensions"
        )
    if dimensions > len(vector):
        raise InvalidRequest(
            f"dimensions: {dimensions} is more than the model's {len(vector)}", "dimensions"
        )
    short = vector[:dimensions]
    if pool.after != "unit":
        return short
    length = math.hypot(*short) or 1.0
    return [x / length for x in short]


def probabilities(state: ServerState, scores: Sequence[float]) -> list[float]:
    """Scores as probabilities: of one label its own, of several one of them; a head that gives
    probabilities is believed."""
    if pool_of(state).after in ("sigmoid", "softmax", "second"):
        return list(scores)
    if len(scores) == 1:
        return [1.0 / (1.0 + math.exp(-max(scores[0], -700.0)))]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def prompt_usage(found: Sequence[Pooled]) -> dict[str, int]:
    """Usage of a call that generates nothing."""
    count = sum(one.output.prompt_tokens for one in found)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
