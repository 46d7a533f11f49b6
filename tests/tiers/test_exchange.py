"""Pages of ranks that keep unequal parts: what is cut and put together again is the same page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from radixlm.tiers.exchange import Exchange, Unequal, cover
from radixlm.tiers.manifest import Manifest, PageGroup, Rectangle

LAYERS, HEADS = 4, 4
GROUP = PageGroup(0, tuple(range(LAYERS)), HEADS, 8, 8)


def _manifest(
    layers: tuple[int, int], heads: tuple[int, int], layout: str, extra: int = 0, rank: int = 0
) -> Manifest:
    num_layers, num_heads = layers[1] - layers[0], heads[1] - heads[0]
    text = layout.format(L=num_layers, H=num_heads)
    size = num_layers * num_heads * 2 * 16 * 8 * 2 + extra
    rectangle = Rectangle(rank, 1, *layers, *heads)
    return Manifest(
        "m", "w", "v", "torch.bfloat16", 16, (GROUP,), layout=text + "; ",
        rectangle=rectangle, page_bytes=(size, 0),
    )  # fmt: skip


TILES = "[{L}, *, {H}, 1, 8, 16] torch.bfloat16, [{L}, *, {H}, 16, 8] torch.bfloat16"
ROWS = "[{L}, *, 16, {H}, 8] torch.bfloat16, [{L}, *, 16, {H}, 8] torch.bfloat16"


def _page(manifest: Manifest, layout: str) -> np.ndarray:
    """The rank's part of one page whose numbers name layer, head, side and place."""
    r = manifest.rectangle
    parts = []
    for side in (0, 1):
        layer, head, token, channel = np.meshgrid(
            np.arange(r.first_layer, r.end_layer), np.arange(r.first_head, r.end_head),
            np.arange(16), np.arange(8), indexing="ij",
        )  # fmt: skip
        values = (((layer * 4 + head) * 16 + token) * 8 + channel + 4096 * side).astype(np.uint16)
        if layout is ROWS:
            values = values.transpose(0, 2, 1, 3)
        elif side == 0:
            values = values.transpose(0, 1, 3, 2)
        parts.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return np.concatenate(parts)


def _split(tp: int, pp: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    layers = [(i * LAYERS // pp, (i + 1) * LAYERS // pp) for i in range(pp)]
    heads = [(i * HEADS // tp, (i + 1) * HEADS // tp) for i in range(tp)]
    return list(itertools.product(layers, heads))


@pytest.mark.parametrize("layout", [TILES, ROWS], ids=["tiles", "rows"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 1)])
def test_pages_survive_unequal_ranks(
    layout: str, ranks: tuple[int, int], stages: tuple[int, int]
) -> None:
    sources = [_manifest(*part, layout) for part in _split(ranks[0], stages[0])]
    for part in _split(ranks[1], stages[1]):
        target = _manifest(*part, layout)
        page = np.zeros(target.page_bytes[0], np.uint8)
        for index in cover(target, sources):
            exchange = Exchange(sources[index], target, 0)
            if exchange.is_same:
                page[:] = _page(sources[index], layout)
                continue
            cut = exchange.cut(_page(sources[index], layout))
            assert cut.nbytes == exchange.num_bytes
            exchange.paste(cut, page)
        np.testing.assert_array_equal(page, _page(target, layout))


def test_a_rank_with_drafts_tells_those_without_that_there_are_none() -> None:
    drafts = TILES + ", [1, *, 3] torch.float32"
    rank0 = _manifest((0, 4), (0, 2), drafts, extra=12 + 1)
    alone = _manifest((0, 4), (0, 4), TILES)
    with_drafts, without = np.ones(rank0.page_bytes[0], np.uint8), _page(alone, TILES)
    exchange = Exchange(alone, rank0, 0)
    exchange.paste(exchange.cut(without), with_drafts)
    own = _manifest((0, 4), (0, 2), TILES)
    np.testing.assert_array_equal(with_drafts[: own.page_bytes[0]], _page(own, TILES))
    back = Exchange(rank0, alone, 0)
    assert back.cut(with_drafts).nbytes == own.page_bytes[0]


def test_ranks_that_lack_heads_are_refused() -> None:
    target = _manifest((0, 4), (0, 4), TILES)
    with pytest.raises(Unequal, match="lack"):
        cover(target, [_manifest((0, 4), (0, 2), TILES)])


def test_other_layouts_are_refused() -> None:
    with pytest.raises(Unequal, match="layouts"):
        Exchange(_manifest((0, 4), (0, 4), ROWS), _manifest((0, 4), (0, 4), TILES), 0)


def test_states_move_between_equal_ranks_only() -> None:
    group = PageGroup(0, (0,), states=("conv",))
    one = Manifest("m", "w", "v", "d", 16, (group,), layout="[1, *, 4] torch.float32; ")
    other = Manifest("m", "w", "v", "d", 16, (group,), layout="[1, *, 8] torch.float32; ")
    with pytest.raises(Unequal, match="states"):
        Exchange(one, other, 0)
    assert Exchange(one, one, 0).is_same
