"""The rows that encoders make of a prompt's media, and where they go in a step.

An encoder runs when a step reaches its media's first place; what it made is kept by content, so
that
the next chunk, a retraction or another request with the same image finds it.

Legend: N rows of one media, T tokens of a step, D model channels, L layers with rows of their own.
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
from radixlm.executor.encoder_outputs import EncoderOutputs
from radixlm.step.batch import ForwardBatch, MediaInputs
from radixlm.step.plan import Item, StepPlan
from radixlm.wire.media import ROWS, Media

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
# what an encoder raises for inputs that do not fit it
_OF_TOWERS = (ValueError, RuntimeError, IndexError, KeyError, TypeError, AssertionError)


class MultimodalEncoder(Protocol):
    """What turns media into rows."""

    def rows(self, media: Media) -> Tensor:
        """float32 [1 + L, N, D]: input embeddings, then what joins the stream behind layers."""
        ...


class MediaRows:
    """Rows by content, the least recently used go first."""

    def __init__(
        self,
        encoder: MultimodalEncoder,
        max_bytes: int = CACHE_BYTES,
        cross_attention_token: int | None = None,
        needs_token_ids: bool = False,
    ) -> None:
        """``cross_attention_token``: the token in the one place of an image that layers attend to.
        ``needs_token_ids``: layers read the tokens in the places of media, its ``input_ids``."""
        self._encoder, self._max_bytes, self._num_bytes = encoder, max_bytes, 0
        self._held: OrderedDict[bytes, Tensor] = OrderedDict()
        self._keeps_ids = needs_token_ids
        self._crossed_token, self._encoder_outputs = (
            cross_attention_token,
            EncoderOutputs(self.made),
        )

    def of(self, media: Media) -> Tensor:
        """[1 + L, N, D]; ValueError where the encoder makes another number of rows than places."""
        rows = self.made(media)
        if rows.shape[1] != media.num_placeholders:
            self._num_bytes -= self._held.pop(media.digest).nbytes
            raise ValueError(
                f"the encoder made {rows.shape[1]} rows of {media.kind} for "
                f"{media.num_placeholders} places"
            )
        return rows

    def made(self, media: Media) -> Tensor:
        """What the encoder makes, or has made before."""
        found = self._held.get(media.digest)
        if found is not None:
            self._held.move_to_end(media.digest)
            return found
        given = media.inputs.get(ROWS)
        rows = self._encoder.rows(media) if given is None else torch.from_numpy(given.read().copy())
        self._held[media.digest] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes and len(self._held) > 1:
            _, old = self._held.popitem(last=False)
            self._num_bytes -= old.nbytes
        return rows

    def put(self, plan: StepPlan, tables: DeviceTables, batch: ForwardBatch) -> dict[str, str]:
        """Write the rows of the media places of this step into the batch. Request id -> why its
        media have no rows: such a request fails alone."""
        failed: dict[str, str] = {}
        at, bidirectional_spans = 0, []
        for item in plan.items:
            for media in tables.state(item.slot).media if item.tokens is not None else ():
                with caught(media, item.rid, failed):
                    self._put_one(media, item, at, batch)
                end = item.start + item.count
                runs = [run for run in media.bidirectional_spans if item.start <= run[0] < end]
                bidirectional_spans += [(at + start - item.start, count) for start, count in runs]
            at += item.count
        batch.bidirectional_spans = tuple(bidirectional_spans)
        if self._crossed_token is not None:
            spans = self._encoder_outputs.cross_attention_spans(plan, tables, failed)
            if spans:
                _add_media(batch).cross_attention_spans = spans
        return failed

    def _put_one(self, media: Media, item: Item, at: int, batch: ForwardBatch) -> None:
        if self._crossed_token is not None:
            self._encoder_outputs.of(media)
        row, end = 0, item.start + item.count
        for start, count in media.spans:
            first, last = max(start, item.start), min(start + count, end)
            if first < last and self._crossed_token is not None:
                batch.token_ids_T[at + first - item.start : at + last - item.start] = (
                    self._crossed_token
                )
            elif first < last:
                made = self.of(media)[:, row + first - start : row + last - start]
                _write(batch, at + first - item.start, made)
                if self._keeps_ids:
                    ids = media.inputs["input_ids"].read()[0, row + first - start :][: last - first]
                    places = slice(at + first - item.start, at + last - item.start)
                    batch.token_ids_T[places] = torch.from_numpy(ids.copy()).to(batch.device)
            row += count


@contextmanager
def caught(media: Media, rid: str, failed: dict[str, str]) -> Iterator[None]:
    """What an encoder raises goes to ``failed``; what the device raises does not."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _OF_TOWERS as error:
        log.warning("request %s: %s", rid, error)
        failed[rid] = f"the {media.kind} cannot be read by its encoder: {error}"


def _write(batch: ForwardBatch, at: int, made: Tensor) -> None:
    """Rows [1 + L, n, D] for the tokens from ``at`` on."""
    num_layers, count, dim = made.shape[0] - 1, made.shape[1], made.shape[2]
    rows = slice(at, at + count)
    embeds, media = batch.add_embeds(dim), _add_media(batch)
    assert embeds.mask_T is not None
    embeds.rows_TD[rows], embeds.mask_T[rows] = made[0].to(batch.device), True
    if media.mask_T is None:
        media.mask_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
    media.mask_T[rows] = True
    if num_layers:
        if media.deepstack_LTD is None:
            media.deepstack_LTD = torch.zeros(
                num_layers, batch.num_tokens, dim, device=batch.device
            )
        media.deepstack_LTD[:, rows] = made[1:].to(batch.device)


def _add_media(batch: ForwardBatch) -> MediaInputs:
    if batch.media is None:
        batch.media = MediaInputs()
    return batch.media
