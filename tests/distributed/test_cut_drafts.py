"""What ranks do for a drafter that rank 0 alone runs."""

from __future__ import annotations

import torch
from tests.distributed.test_cut_models import prompts
from tests.fakes.cut_model import CutModel, StepRunner, run_ranks
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import bind
from radixlm.step.batch import ForwardBatch, HiddenNeeds


class Tapped(StepRunner):
    """Keeps what a drafter reads; rank 0's drafts rest in the second step."""

    rests = False

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        batch.leaves_taps = not self.rests
        found = super().logits(batch)
        self.tapped = batch.taps_TN
        return found


def steps(runner: Tapped, tokens: dict[int, list[int]], can_rest: bool) -> list[torch.Tensor]:
    found = [*runner.step({s: t[:-1] for s, t in tokens.items()}).values()]
    assert runner.tapped is not None
    found.append(runner.tapped)
    runner.rests = can_rest
    return [*found, *runner.step({s: t[-1:] for s, t in tokens.items()}).values()]


def test_steps_of_all_ranks_are_alike_while_drafts_rest() -> None:
    """Hidden states for the drafter and logits equal those of one rank; the head stays whole."""
    folder = cached_tiny("Qwen3ForCausalLM", tie_word_embeddings=False)
    whole = load_model(folder, bind("cpu", {}))
    cut = CutModel(folder, Topology(tp=2), shared=True, cuts_output_head=False)
    for model in (whole, *cut.models):
        model.tap(HiddenNeeds((0, 1), True))  # type: ignore[union-attr]
    tokens = prompts(whole.decoder.vocab)
    wanted = steps(Tapped(whole, "cpu", 16), tokens, False)
    runners = [Tapped(model, "cpu", 16) for model in cut.models]
    calls = [lambda r=r, n=n: steps(r, tokens, n == 0) for n, r in enumerate(runners)]
    for found in run_ranks(calls, cut.ranks):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
