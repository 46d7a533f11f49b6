"""Encoder outputs: computed once for each content, and placed at its placeholder tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from radixlm.executor.device_tables import DeviceTables
from radixlm.media.encoder_cache import EncoderCache
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Admission, Item, StepPlan
from radixlm.step.result import ItemResult
from radixlm.wire.media import Array, Media
from radixlm.wire.sampling_params import SamplingParams

DIM = 3
CPU = torch.device("cpu")


class MultimodalEncoder:
    """Row r of a media item is (its number, r, layer)."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def encode(self, media: Media) -> torch.Tensor:
        number = media.digest[0]
        self.runs.append(number)
        made = torch.zeros(2, media.num_placeholders, DIM)
        made[:, :, 0], made[:, :, 1] = number, torch.arange(media.num_placeholders)
        made[1, :, 2] = 1
        return made


def media(number: int, *spans: tuple[int, int], bidirectional_spans: bool = False) -> Media:
    return Media("image", bytes([number]) * 32, spans, {}, spans if bidirectional_spans else ())


def step(
    rows: EncoderCache,
    given: tuple[Media, ...],
    *chunks: tuple[int, int],
    failed: dict[str, ItemResult] | None = None,
) -> ForwardBatch:
    """Chunks (start, count) of slots 0, 1, ... that all have the media `given`."""
    tables = DeviceTables(4, 4, 1, CPU)
    ids, items = np.zeros(64, np.int32), []
    for slot, (start, count) in enumerate(chunks):
        none = np.zeros(0, np.int32)
        tables.admit(Admission(f"r{slot}", slot, SamplingParams(), ids, none, media=given))
        items.append(Item(f"r{slot}", slot, start, count, ids[:count], False))
    total = sum(count for _, count in chunks)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        torch.zeros(total, dtype=torch.int64), empty, empty, empty, empty, (), (), empty,
        None, 0, 0,  # type: ignore[arg-type]  # no attention runs
    )  # fmt: skip
    found = rows.put(StepPlan(0, tuple(items)), tables, batch)
    assert failed is not None or not found
    if failed is not None:
        failed.clear()
        failed |= found
    return batch


def test_a_chunk_gets_the_rows_of_its_places() -> None:
    batch = step(EncoderCache(MultimodalEncoder()), (media(1, (2, 3), (8, 2)),), (4, 6))
    embeds, inputs = batch.embeds, batch.media
    assert embeds is not None and embeds.mask_T is not None and inputs is not None
    assert embeds.mask_T.tolist() == [True, False, False, False, True, True]
    assert embeds.rows_TD[embeds.mask_T, 1].tolist() == [2.0, 3.0, 4.0]
    assert inputs.deepstack_LTD is not None
    assert inputs.deepstack_LTD[0, :, 2].tolist() == [1, 0, 0, 0, 1, 1]


def test_content_is_encoded_once_and_evicted_by_age() -> None:
    encoder = MultimodalEncoder()
    one = 2 * 4 * DIM * 4  # bytes of a media item with four tokens
    rows = EncoderCache(encoder, max_bytes=2 * one)
    for number in (1, 2, 1, 3, 1, 2):
        rows.of(media(number, (0, 4)))
    assert encoder.runs == [1, 2, 3, 2]  # 3 evicted 2, the least recently used


def test_bidirectional_spans_are_positions_of_the_step() -> None:
    both = (media(1, (2, 3), bidirectional_spans=True), media(2, (8, 2), bidirectional_spans=True))
    batch = step(EncoderCache(MultimodalEncoder()), both, (0, 6), (6, 5))
    assert batch.bidirectional_spans == ((2, 3), (8, 2))


def test_a_wrong_number_of_encoder_rows_is_named() -> None:
    class Short(MultimodalEncoder):
        def encode(self, media: Media) -> torch.Tensor:
            return super().encode(media)[:, :-1]

    with pytest.raises(ValueError, match="3 rows of image for 4 placeholders"):
        EncoderCache(Short()).of(media(1, (0, 4)))


def test_an_encoder_error_fails_its_requests_alone() -> None:
    class Picky(MultimodalEncoder):
        def encode(self, media: Media) -> torch.Tensor:
            if media.digest[0] == 2:
                raise RuntimeError("no such shape")
            return super().encode(media)[:, : -(media.digest[0] == 3) or None]

    rows = EncoderCache(Picky())
    failed: dict[str, ItemResult] = {}
    for number in (1, 2, 3):
        step(rows, (media(number, (2, 3)),), (0, 6), (6, 2), failed=failed)
        reason = {2: "", 3: ": the encoder made 2 rows of image for 3 placeholders"}.get(number)
        text = f"the image cannot be read by its encoder{reason}"
        expected = {} if reason is None else {"r0": ItemResult(error=text)}
        assert failed == expected


def test_arrays_of_the_client_are_its_fault() -> None:
    class Picky(MultimodalEncoder):
        def encode(self, media: Media) -> torch.Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    sent = {"pixel_values": Array.of(np.zeros((3, 4), np.float32))}
    image = msgspec.structs.replace(media(1, (0, 4)), inputs=sent, is_preprocessed=True)
    failed: dict[str, ItemResult] = {}
    step(EncoderCache(Picky()), (image,), (0, 6), failed=failed)
    error = failed["r0"].error
    assert failed["r0"].status == 400 and error is not None
    assert "pixel_values [3, 4]" in error and "mat1" not in error
