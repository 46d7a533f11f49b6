"""Runs the multimodal encoders, and writes their output into a step's input embeddings.

An encoder runs when a step reaches the first placeholder of its media. Its output is cached by
content: the next chunk, a retraction or another request with the same image finds it.

Legend: N placeholders of one media, T tokens of a step, D model channels, L DeepStack layers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.media.encoder_outputs import EncoderOutputs
from radixlm.media.optional_inputs import add_optional_inputs
from radixlm.step.batch import ForwardBatch, MediaInputs
from radixlm.step.plan import Item, Items, StepPlan
from radixlm.step.result import ItemResult
from radixlm.wire.media import ROWS, Media

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
# what an encoder raises for inputs that do not fit it
_ENCODER_ERRORS = (ValueError, RuntimeError, IndexError, KeyError, TypeError, AssertionError)


class _Misfit(ValueError):
    """An output that does not fit its placeholders, in words for the client."""


class MultimodalEncoder(Protocol):
    """Turns media into embeddings."""

    def encode(self, media: Media) -> Tensor:
        """float32 [1 + L, N, D]: input embeddings, then what DeepStack layers add."""


class NoEncoder:
    """Of models that read text: clients may send vectors in the place of tokens (``ROWS``)."""

    def encode(self, media: Media) -> Tensor:
        raise ValueError("the model has no encoder")


class EncoderCache:
    """Outputs of an encoder by content; the least recently used are dropped first."""

    def __init__(
        self,
        encoder: MultimodalEncoder,
        max_bytes: int = CACHE_BYTES,
        cross_attention_token: int | None = None,
        needs_token_ids: bool = False,
    ) -> None:
        """``cross_attention_token``: the placeholder of an image that layers attend to.
        ``needs_token_ids``: the model reads the token ids of placeholders, the ``input_ids`` of
        the media."""
        self._encoder, self._max_bytes, self._num_bytes = encoder, max_bytes, 0
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()
        self._needs_token_ids = needs_token_ids
        self._cross_attention_token = cross_attention_token
        self._cross_attention = EncoderOutputs(self.output)

    def take_encoder(self, other: EncoderCache) -> None:
        """Encode by the encoder of ``other`` from now on, which has other weights."""
        self._encoder, self._num_bytes = other._encoder, 0
        self._cache.clear()
        self._cross_attention = EncoderOutputs(self.output)

    def of(self, media: Media) -> Tensor:
        """[1 + L, N, D]; ValueError where the output does not fit the number of placeholders."""
        rows = self.output(media)
        if rows.shape[1] != media.num_placeholders:
            self._num_bytes -= self._cache.pop(media.digest).nbytes
            raise _Misfit(
                f"the encoder made {rows.shape[1]} rows of {media.kind} for "
                f"{media.num_placeholders} placeholders"
            )
        return rows

    def output(self, media: Media) -> Tensor:
        """The encoder's output, or what the client sent in its place."""
        cached = self._cache.get(media.digest)
        if cached is not None:
            self._cache.move_to_end(media.digest)
            return cached
        sent = media.inputs.get(ROWS)
        rows = self._encoder.encode(media) if sent is None else torch.from_numpy(sent.read().copy())
        self._cache[media.digest] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._num_bytes -= old.nbytes
        return rows

    def put(
        self, plan: StepPlan, tables: DeviceTables, batch: ForwardBatch
    ) -> dict[str, ItemResult]:
        """Write the embeddings of this step's placeholders into the batch, and what else its
        requests bring besides token ids. Returns request id -> error for the requests whose media
        failed; the others go on."""
        add_optional_inputs(plan, tables, batch)
        failed: dict[str, ItemResult] = {}
        if self._cross_attention_token is None and not Items.of(plan.items).others:
            return failed
        at, spans = 0, []
        for item in plan.items:
            for media in tables.state(item.slot).media if item.tokens is not None else ():
                with caught(media, item.rid, failed):
                    self._put_one(media, item, at, batch)
                end = item.start + item.count
                runs = [run for run in media.bidirectional_spans if item.start <= run[0] < end]
                spans += [(at + start - item.start, count) for start, count in runs]
                batch.spans_ignore_window |= bool(runs) and media.spans_ignore_window
            at += item.count
        batch.bidirectional_spans = tuple(spans)
        if self._cross_attention_token is not None:
            attending = self._cross_attention.spans(plan, tables, failed)
            if attending:
                _add_media(batch).cross_attention_spans = attending
        return failed

    def check(self, media: Media, rid: str, failed: dict[str, ItemResult]) -> None:
        """Encode one media, and note an error likewise."""
        with caught(media, rid, failed):
            self.of(media)

    def _put_one(self, media: Media, item: Item, at: int, batch: ForwardBatch) -> None:
        if self._cross_attention_token is not None:
            self._cross_attention.of(media)
        row, end = 0, item.start + item.count
        for start, count in media.spans:
            first, last = max(start, item.start), min(start + count, end)
            tokens = slice(at + first - item.start, at + last - item.start)
            if first < last and self._cross_attention_token is not None:
                batch.token_ids_T[tokens] = self._cross_attention_token
            elif first < last:
                rows = self.of(media)[:, row + first - start : row + last - start]
                _write(batch, tokens, rows)
                if self._needs_token_ids:
                    ids = media.inputs["input_ids"].read()[0, row + first - start :][: last - first]
                    batch.token_ids_T[tokens] = torch.from_numpy(ids.copy()).to(batch.device)
            row += count


@contextmanager
def caught(media: Media, rid: str, failed: dict[str, ItemResult]) -> Iterator[None]:
    """Put an encoder's errors into ``failed``; those of the device are raised."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _ENCODER_ERRORS as error:
        log.warning("request %s: %s: %s", rid, type(error).__name__, error)
        reason = f": {error}" if isinstance(error, _Misfit) else ""
        text, status = f"the {media.kind} cannot be read by its encoder{reason}", 500
        if media.is_preprocessed:
            sent = ", ".join(f"{name} {list(a.shape)}" for name, a in media.inputs.items())
            text, status = f"{text}: send what the model's processor makes, not {sent}", 400
        failed[rid] = ItemResult(error=text, status=status)


def _write(batch: ForwardBatch, tokens: slice, rows: Tensor) -> None:
    """Put rows [1 + L, n, D] in the place of ``tokens``."""
    num_layers, dim = rows.shape[0] - 1, rows.shape[2]
    embeds, media = batch.add_embeds(dim), _add_media(batch)
    assert embeds.mask_T is not None
    embeds.rows_TD[tokens], embeds.mask_T[tokens] = rows[0].to(batch.device), True
    if media.mask_T is None:
        media.mask_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
    media.mask_T[tokens] = True
    if num_layers:
        if media.deepstack_LTD is None:
            shape = (num_layers, batch.num_tokens, dim)
            media.deepstack_LTD = torch.zeros(shape, device=batch.device)
        media.deepstack_LTD[:, tokens] = rows[1:].to(batch.device)


def _add_media(batch: ForwardBatch) -> MediaInputs:
    if batch.media is None:
        batch.media = MediaInputs()
    return batch.media
