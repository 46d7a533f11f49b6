"""What ranks do for a drafter that rank 0 alone runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.test_cut_models import prompts
from tests.engine.test_draft_models import Rounds
from tests.fakes.cut_model import CutModel, StepRunner, run_ranks
from tests.fakes.paged_runner import load_model
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.models.test_mtp_families import with_block

from radixlm import Engine
from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import bind
from radixlm.models.decoder import DecoderModel
from radixlm.models.taps import HiddenNeeds
from radixlm.step.batch import ForwardBatch


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


def tokens_of(engine: Engine, model: str) -> list[list[int]]:
    """Of requests one after another."""
    prompts = [[3 + (7 * n + k) % 300 for k in range(20 + 9 * n)] for n in range(3)]
    if model == "radix-tiny":
        assert engine.tokenizer is not None
        texts = ("Tell me: one two three, ", "Paris is the ", "How do I boil water? ")
        prompts = [engine.tokenizer.encode(text * 3) for text in texts]
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return [engine.generate(input_ids=p, sampling_params=params)["output_ids"] for p in prompts]


TAPS, TAPS_OF_RANKS = ("EAGLE3", {"pp_size": 2}), ("EAGLE3", {"pp_size": 2, "tp_size": 2})
OWN_MODEL, SHARED_HEAD = ("STANDALONE", {"pp_size": 2}), ("NEXTN", {"pp_size": 2})


# how a rank runs its layers matters to what they leave for the drafter, the taps
@pytest.mark.parametrize(
    ("algorithm", "ranks", "shared"),
    [
        pytest.param(*TAPS, True, id="taps"),
        pytest.param(*TAPS, False, id="taps, layers", marks=pytest.mark.slow),
        pytest.param(*TAPS_OF_RANKS, True, id="taps of ranks"),
        pytest.param(*TAPS_OF_RANKS, False, id="taps of ranks, layers"),
        pytest.param(*OWN_MODEL, True, id="a model of its own"),
        pytest.param(*OWN_MODEL, False, id="its own, layers", marks=pytest.mark.slow),
        pytest.param(*SHARED_HEAD, True, id="a head that is shared"),
        pytest.param(*SHARED_HEAD, False, id="a shared head, layers", marks=pytest.mark.slow),
    ],
)
def test_stages_draft_as_one_rank(
    algorithm: str,
    ranks: dict[str, int],
    shared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens, and as many drafts accepted in each round."""
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", Rounds)
    if not shared:
        monkeypatch.setattr(DecoderModel, "_program_for", lambda self, batch: None)
    model = "radix-tiny"
    if algorithm == "NEXTN":
        model = str(with_block("MiMoV2FlashForCausalLM", tmp_path / "model")[0])
    options = {"model_path": model, "speculative_algorithm": algorithm, "cpu_threads": 1}
    options |= {"max_total_tokens": 4096, "chunked_prefill_size": 16, "speculative_num_steps": 3}
    found = []
    for more in ({}, ranks):
        Rounds.seen.clear()
        with thread_engine(monkeypatch, shared, **options | more) as engine:
            found.append((tokens_of(engine, model), list(Rounds.seen)))
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[0][1]) > 0 or algorithm == "NEXTN"
    assert found[0][1]
