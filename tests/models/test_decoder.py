"""Every architecture through the paged path equals Hugging Face in float32."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny, reference_model

LENGTHS = (29, 12, 17)


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        i: torch.randint(3, vocab, (n,), generator=generator).tolist()
        for i, n in enumerate(lengths)
    }


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_hugging_face(arch: str) -> None:
    """Three sequences, prefilled in three mixed chunks over shuffled pages, then decoded."""
    folder = cached_tiny(arch)
    reference = reference_model(folder)
    model = load_model(folder)
    tokens = prompts(model.decoder.vocab)
    runner = PagedRunner(model)
    head = {s: t[:-2] for s, t in tokens.items()}
    ours = runner.prefill(head, num_chunks=3)
    for place in (-2, -1):
        last = runner.step({s: [t[place]] for s, t in tokens.items()})
        ours = {s: torch.cat((ours[s], last[s])) for s in tokens}
    for sequence, ids in tokens.items():
        with torch.inference_mode():
            theirs = reference(torch.tensor([ids])).logits[0].float()
        assert theirs.std() > 0.05, "degenerate logits show nothing"
        assert relative_error(ours[sequence], theirs) < 1e-4
