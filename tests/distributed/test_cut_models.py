"""A model cut among ranks has the bits of the whole one."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.cut_model import CutModel, logits_of
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import bind

LENGTHS = (19, 7, 12)


def prompts(vocab: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(0)
    return {
        i: torch.randint(3, vocab, (n,), generator=generator).tolist()
        for i, n in enumerate(LENGTHS)
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bits_equal_the_whole_model(arch: str) -> None:
    """Prompts in chunks and decoding tokens, on two ranks."""
    folder = cached_tiny(arch)
    whole = load_model(folder, bind("cpu", {}))
    whole.use_program = False
    tokens = prompts(whole.decoder.vocab)
    wanted = logits_of(PagedRunner(whole, "cpu", 16), tokens)
    found = CutModel(folder, Topology(tp=2)).prefill(tokens, backend="cpu", page_size=16)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)
