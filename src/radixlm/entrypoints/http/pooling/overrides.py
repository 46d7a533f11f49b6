"""embed_overrides: vectors in the place of the tokens with one id, as in SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import WithJsonSchema

from radixlm.base.errors import InvalidRequest
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.http.state import ServerState
from radixlm.multimodal.processor import Prompt
from radixlm.wire.media import ROWS, Array, Media, content_digest, media_ids

TOKEN_ID, OVERRIDES = "embed_override_token_id", "embed_overrides"
_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
Vectors = Annotated[list[Any], WithJsonSchema(_ROWS)]
VectorsOfInputs = Annotated[
    list[Any],
    WithJsonSchema(
        {"anyOf": [_ROWS, {"type": "array", "items": {"anyOf": [_ROWS, {"type": "null"}]}}]}
    ),
]
Rows = NDArray[np.float32]  # [N, D]


class Overrides:
    """What a request puts in the place of tokens. ``rows``: of each input, None: nothing."""

    def __init__(self, token_id: int, rows: Sequence[Rows | None], param: str) -> None:
        self._token_id, self._rows, self._param = token_id, rows, param

    def put(self, state: ServerState, ids: list[int], index: int) -> Prompt | None:
        """Input ``index`` with its vectors; None if it has none. InvalidRequest unless there is a
        vector for each of the tokens."""
        rows = self._rows[index]
        if rows is None:
            return None
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        if len(places) != len(rows):
            raise InvalidRequest(
                f"{self._param}: input {index} contains {len(places)} occurrences of "
                f"{TOKEN_ID}={self._token_id}, but has {len(rows)} vectors",
                self._param,
            )
        dim = state.intake.facts.embed_dim
        if rows.shape[1] != dim:
            raise InvalidRequest(
                f"{self._param}: vectors of {rows.shape[1]} numbers; the model's have {dim}",
                self._param,
            )
        digest = content_digest(OVERRIDES.encode(), rows.tobytes())
        plain = np.asarray(ids, np.int32)
        marked = plain.copy()
        marked[places] = media_ids(digest, len(places))
        spans = tuple((place, 1) for place in places)
        media = Media("image", digest, spans, {ROWS: Array.of(rows[None])}, is_preprocessed=True)
        return Prompt(ids=marked, plain=plain, media=(media,), rope_ids=None)


def read_overrides(
    state: ServerState, token_id: int | None, value: list[Any] | None, count: int
) -> Overrides | None:
    """The vectors of ``count`` inputs: of each a list of them or null, or of a single input the
    list alone. None if nothing is asked for."""
    if not _is_asked(state, token_id, {OVERRIDES: value}):
        return None
    assert value is not None and token_id is not None
    first = next((one for one in value if one is not None), None)
    is_single = isinstance(first, list) and bool(first) and isinstance(first[0], int | float)
    lists = [value] if is_single else value
    if len(lists) != count:
        message = f"{OVERRIDES} has {len(lists)} entries for {count} inputs"
        raise InvalidRequest(message, OVERRIDES)
    rows = [_rows(one, f"{OVERRIDES}[{i}]", OVERRIDES) for i, one in enumerate(lists)]
    return Overrides(token_id, rows, OVERRIDES)


def read_pair_overrides(
    state: ServerState,
    token_id: int | None,
    query: list[Any] | None,
    items: list[Any] | None,
    count: int,
    item_first: bool,
) -> Overrides | None:
    """The vectors of a query and of ``count`` items that are read together."""
    of_query, of_items = "query_embed_overrides", "item_embed_overrides"
    if not _is_asked(state, token_id, {of_query: query, of_items: items}):
        return None
    assert token_id is not None
    if items is not None and len(items) != count:
        raise InvalidRequest(f"{of_items} has {len(items)} entries for {count} items", of_items)
    first = _rows(query, of_query, of_query)
    rows = []
    for index in range(count):
        one = _rows(items[index], f"{of_items}[{index}]", of_items) if items is not None else None
        sides = [
            side for side in ((one, first) if item_first else (first, one)) if side is not None
        ]
        if len({side.shape[1] for side in sides}) > 1:
            raise InvalidRequest(f"{of_items}: vectors of other lengths than the query's", of_items)
        rows.append(np.concatenate(sides) if sides else None)
    return Overrides(token_id, rows, of_items if items is not None else of_query)


def _is_asked(state: ServerState, token_id: int | None, fields: dict[str, Any]) -> bool:
    """Whether there are vectors; InvalidRequest if they or their token are missing, and for models
    that have no place for them."""
    given = [name for name, value in fields.items() if value is not None]
    if given and token_id is None:
        raise InvalidRequest(f"{TOKEN_ID} is required when {given[0]} is provided", TOKEN_ID)
    if token_id is not None and not given:
        raise InvalidRequest(f"{TOKEN_ID} requires {' or '.join(fields)}", TOKEN_ID)
    if given and not _has_place(state.info):
        message = f"{given[0]}: {state.info.architecture} reads tokens only"
        raise InvalidRequest(message, given[0])
    return bool(given)


def _has_place(info: ModelInfo) -> bool:
    """Whether the model's embeddings may be given, without more that belongs to media."""
    media = info.media
    if info.decoder.encoder is not None or media is None:
        return info.decoder.encoder is None
    return not (
        media.embeds_images
        or media.is_encoder_decoder
        or media.uses_cross_attention
        or media.adds_to_embeddings
        or media.needs_token_ids
    )


def _rows(value: Any, where: str, param: str) -> Rows | None:
    if value is None or (isinstance(value, list) and not value):
        return None
    try:
        rows = np.asarray(value, dtype="<f4")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{where} must be vectors of one length", param) from error
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise InvalidRequest(f"{where} must be finite vectors of one length", param)
    return rows
