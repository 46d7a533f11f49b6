"""From texts, token ids, pairs of texts and media to vectors or scores, for all pooling routes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from radixlm.arch.sentence_transformers import SentenceTransformersConfig
from radixlm.arch.spec import Pool
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.middleware import fair_share_key
from radixlm.entrypoints.http.off_loop import off_loop
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.sampling import checked_truncation
from radixlm.entrypoints.http.pooling.overrides import Overrides
from radixlm.entrypoints.http.pooling.token_rows import check_rows, rows_of
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.media import MediaSource
from radixlm.intake.records import GenerateRequest, Output
from radixlm.multimodal.processor import Prompt as ReadPrompt
from radixlm.wire.requests import PoolingParams
from radixlm.wire.sampling_params import SamplingParams

MAX_INPUTS = 2048
_PER_TOKEN = frozenset(("late", "steps"))  # kinds of pooling that leave a row a token
Limit = Annotated[int, Field(ge=-1)]  # truncate_prompt_tokens of vLLM
# texts that clients of the reference send with an image when they have none
_NO_TEXT = (None, "", "padding")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that the model reads together: a query and a document."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    """Media with an optional text. ``is_rendered``: the text is a prompt with placeholders; else
    text and media are a user message for the chat template. ``adds_special_tokens``: to a rendered
    one."""

    text: str | None
    sources: tuple[MediaSource, ...]
    is_rendered: bool = False
    adds_special_tokens: bool = True


Prompt = str | list[int] | Pair | MultimodalPrompt


@dataclass(frozen=True, slots=True)
class PoolingResult:
    """The vector or scores of one prompt, its last Output, and the pooled hidden state from which
    the head made them, where it was asked for."""

    vector: list[float]
    output: Output
    hidden: list[float] | None = None
    rows: list[list[float]] | None = None  # of tokens, with ``per_token``


def pool_of(state: ServerState) -> Pool:
    """How the model pools; InvalidRequest for a model that generates."""
    pool = state.info.decoder.pool
    if pool is None:
        raise InvalidRequest(
            f"{state.info.architecture} generates text; start the server with --is-embedding to "
            "get vectors from it"
        )
    return pool


def has_scores(state: ServerState) -> bool:
    """Whether the model gives scores."""
    pool = state.info.decoder.pool
    return pool is not None and pool.gives == "scores"


def require_score_head(state: ServerState) -> Pool:
    """How the model pools; InvalidRequest unless it gives scores."""
    if not has_scores(state):
        raise InvalidRequest(
            f"{state.info.architecture} has no score head: serve a model for sequence "
            "classification or rewards"
        )
    return pool_of(state)


def checked_limit(state: ServerState, limit: int | None) -> int | None:
    """``truncate_prompt_tokens`` as it is; InvalidRequest above the context."""
    return checked_truncation(limit, state.intake.facts.context_len)


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
    priority: int | None = None,
    prompt_name: str | None = None,
    adapter: str | list[str | None] | None = None,
    limit: int | None = None,
    with_hidden: bool = False,
    adds_special_tokens: bool = True,
    overrides: Overrides | None = None,
    per_token: bool = False,
    is_raw: bool = False,
) -> list[PoolingResult]:
    """The vectors or scores of ``prompts``, in order. Errors name ``param``. ``prompt_name``: the
    model's prompt that is put before each text. ``adapter``: a name, or one for each prompt.
    ``limit``: tokens that are left of a longer prompt; -1: as many as the context takes.
    ``with_hidden``: return pooled hidden states too. ``adds_special_tokens``: to texts.
    ``overrides``: vectors in the place of tokens. ``per_token``: rows of tokens instead.
    ``is_raw``: logits in the place of probabilities, vectors that the model does not normalize."""
    kinds = pool_of(state).pooling.split("+")
    if with_hidden and not _PER_TOKEN.isdisjoint(kinds):
        message = "return_pooled_hidden_states: this model scores tokens, it pools no hidden state"
        raise InvalidRequest(message, "return_pooled_hidden_states")
    is_whole, has_steps = kinds != ["last"] or per_token, kinds == ["steps"]
    rids = _of_each(rid, len(prompts), "rid")
    if isinstance(rid, str) and len(prompts) > 1:
        rids = [f"{rid}_{index}" for index in range(len(prompts))]
    adapters = _of_each(adapter, len(prompts), "lora_path")
    prefix = prompt_text(state.info.sentence, prompt_name)
    requests = []
    for index, prompt in enumerate(prompts):
        where = f"{param}[{index}]"
        ids: list[int] | None = None
        read, first_len = None, 0
        if isinstance(prompt, MultimodalPrompt):
            if limit not in (None, -1):
                raise InvalidRequest(f"{where}: a prompt with media is not truncated", where)
            read = await _media_prompt(state, prompt, where)
        else:
            ids, first_len = await _ids(
                state, prompt, where, param, prefix, limit, adds_special_tokens
            )
            read = overrides.put(state, ids, index) if overrides is not None else None
            ids = ids if read is None else None
        requests.append(
            GenerateRequest(
                sampling=SamplingParams(max_new_tokens=0),
                input_ids=ids,
                prompt=read,
                pooling=PoolingParams(
                    first_len, is_whole, with_hidden, per_token and not has_steps, is_raw
                ),
                rid=rids[index],
                priority=priority,
                fair_key=fair_share_key(),
                adapter=adapters[index] or None,
            )
        )
    if per_token:
        check_rows(state, pool_of(state), requests)
    results = await generate.collect(state, requests)
    if per_token:
        return [await _rows(state, outputs[0]) for outputs in results]
    num_hidden = state.intake.facts.embed_dim * len(kinds) if with_hidden else 0
    return [_pooled(outputs[0], num_hidden) for outputs in results]


def _of_each(value: str | Sequence[str | None] | None, count: int, param: str) -> list[str | None]:
    """The value of each prompt; InvalidRequest for a list of another length."""
    values = [value] * count if value is None or isinstance(value, str) else list(value)
    if len(values) != count:
        raise InvalidRequest(f"{param} has {len(values)} entries for {count} inputs", param)
    return values


def _pooled(output: Output, num_hidden: int) -> PoolingResult:
    """``num_hidden``: numbers of the hidden state behind the vector."""
    if output.pooled is None:
        raise InvalidRequest("the engine returned no vector for this prompt")
    end = len(output.pooled) - num_hidden
    return PoolingResult(output.pooled[:end], output, output.pooled[end:] if num_hidden else None)


async def _rows(state: ServerState, output: Output) -> PoolingResult:
    size = sum(map(len, output.hidden_states or ()))
    rows = await off_loop(size, rows_of, state, pool_of(state), output)
    return PoolingResult([], output, rows=rows)


async def _media_prompt(state: ServerState, prompt: MultimodalPrompt, where: str) -> ReadPrompt:
    """The prompt of text and media; InvalidRequest names the field."""
    reader = state.media
    text, sources = prompt.text, prompt.sources
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
    if prompt.is_rendered:
        return await reader.prompt(text or "", sources, prompt.adds_special_tokens)
    await reader.ready()
    parts: list[dict[str, Any]] = [{"type": one.kind} for one in sources]
    if text:
        parts.append({"type": "text", "text": text})
    template = state.require_template()
    written = template.render([{"role": "user", "content": parts}])
    return await reader.prompt(written, sources, template.adds_special_tokens)


def prompt_text(sentence: SentenceTransformersConfig | None, name: str | None) -> str:
    """The prompt called ``name``, or the model's default one; "" if there is none."""
    prompts = sentence.prompts if sentence is not None else {}
    if name is not None and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"prompt_name: {name!r:.80} is unknown; known: {known}", "prompt_name")
    name = name or (sentence.default_prompt if sentence is not None else None)
    return prompts.get(name, "") if name else ""


async def _ids(
    state: ServerState,
    prompt: str | list[int] | Pair,
    where: str,
    param: str,
    prefix: str,
    limit: int | None,
    adds_special_tokens: bool,
) -> tuple[list[int], int]:
    """(token ids, how many of them are of the first text of a pair). They are checked, and
    truncated to ``limit`` or, with --allow-auto-truncate, to the context."""
    first_len = 0
    if isinstance(prompt, Pair):
        ids, first_len = await _pair_ids(state, prompt, param)
    elif isinstance(prompt, str):
        text = _prepared(state, prefix + prompt)
        ids = await encode(state, text, param, adds_special_tokens, truncates=limit is not None)
    else:
        ids = prompt
    facts = state.intake.facts
    most = facts.context_len if limit == -1 or facts.allow_auto_truncate else len(ids)
    if limit is not None and limit != -1:
        most = min(max(limit, 1), most)
    if len(ids) > most:
        ids, first_len = _truncated(state, ids, most), min(first_len, most)
    checked = ids[: facts.context_len]  # intake rejects longer ones
    bad = next((i for i in checked if not 0 <= i < facts.vocab), None)
    if bad is not None or not ids:
        what = "it has no tokens" if bad is None else f"{bad} is not a token id"
        raise InvalidRequest(f"{where}: {what}", param)
    return ids, first_len


def _prepared(state: ServerState, text: str) -> str:
    """The text, preprocessed as sentence-transformers does."""
    sentence = state.info.sentence
    if sentence is None:
        return text
    text = text.strip()
    return text.lower() if sentence.is_lower_case else text


def _truncated(state: ServerState, ids: list[int], length: int) -> list[int]:
    """The first ``length`` ids; the special ids at the end stay."""
    closing = set(state.tokenizer.encode("")) if state.tokenizer is not None else set()
    tail = 0
    while tail < length and ids[len(ids) - tail - 1] in closing:
        tail += 1
    return ids[: length - tail] + ids[len(ids) - tail :]


def has_chat_template(state: ServerState) -> bool:
    """Whether the checkpoint or --chat-template has a chat template."""
    has_template = state.tokenizer is not None and state.tokenizer.chat_template() is not None
    return has_template or state.config.serve.chat_template is not None


async def _pair_ids(state: ServerState, pair: Pair, param: str) -> tuple[list[int], int]:
    """The tokenizer joins the texts of a cross-encoder; the chat template of a decoder renders them
    as a question and its answer."""
    if state.info.decoder.encoder is None and has_chat_template(state) and state.template:
        messages = [
            {"role": "user", "content": pair.first},
            {"role": "assistant", "content": pair.second},
        ]
        text = state.template.render(messages, add_generation_prompt=False)
        return await encode(state, text, param, state.template.adds_special_tokens), 0
    ids, first_len = state.require_tokenizer().encode_pair(pair.first, pair.second)
    return ids, first_len


def truncate(
    state: ServerState, vector: list[float], dimensions: int | None, is_raw: bool = False
) -> list[float]:
    """The first ``dimensions`` numbers, normalized again if the whole vector is."""
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
    return normalized(short) if pool.after == "unit" and not is_raw else short


def normalized(vector: Sequence[float]) -> list[float]:
    """The vector of length 1 in the same direction."""
    length = math.hypot(*vector) or 1.0
    return [x / length for x in vector]


def normalizes(state: ServerState, is_asked: bool | None) -> bool:
    """Whether vectors are to be normalized that the model leaves as they are."""
    pool = pool_of(state)
    return bool(is_asked) and pool.gives != "scores" and pool.after != "unit"


def probabilities(state: ServerState, scores: Sequence[float]) -> list[float]:
    """Scores as probabilities: sigmoid of one label, softmax of several; a head that gives
    probabilities already is left as it is."""
    if pool_of(state).after in ("sigmoid", "softmax", "second"):
        return list(scores)
    if len(scores) == 1:
        return [1.0 / (1.0 + math.exp(-max(scores[0], -700.0)))]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def activated(state: ServerState, score: float, use_activation: bool | None) -> float:
    """A pair's score as vLLM's field asks: true as a probability, None as the model gives it; false
    where it was pooled with ``is_raw``."""
    if not use_activation or not has_scores(state):
        return score
    return probabilities(state, [score])[0]


def prompt_usage(results: Sequence[PoolingResult]) -> dict[str, int]:
    """The usage of a pooling call."""
    count = sum(one.output.prompt_tokens for one in results)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
