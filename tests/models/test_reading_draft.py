"""Assistants of Gemma 4 draft what Hugging Face's classes draft, from the target's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.assistants import HIDDEN, make_assistant
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model
from tests.models.test_decoder import relative_error
from tests.models.test_drafts import BACKENDS, kernels_of

from radixlm.arch.hf import describe_draft
from radixlm.layers.context import LayerContext
from radixlm.models.reading_draft import ReadingDraft, read_layers
from radixlm.models.taps import HiddenNeeds
from radixlm.step.batch import ForwardBatch
from radixlm.weights.load import load_weights

COUNT = 5  # tokens, within the window


def at_the_end(runner: PagedRunner, token: int) -> ForwardBatch:
    """One token behind those of sequence 0, which are all that it reads."""
    length = len(runner.known[0])
    batch = runner.batch({0: [token]})
    runner.known[0].pop()
    batch.kv_len_S, batch.max_kv_len = torch.tensor([length], dtype=torch.int32), length + 1
    return batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clusters", [0, 16])
@pytest.mark.parametrize("architecture", ["Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"])
def test_an_assistant(architecture: str, clusters: int, backend: str, tmp_path: Path) -> None:
    folder = cached_tiny(architecture)
    assistant = make_assistant(tmp_path, architecture, clusters)
    target = load_model(folder, kernels_of(backend))
    spec = describe_draft(tmp_path)
    assert spec is not None and spec.reads_target
    model = ReadingDraft(spec, LayerContext(target.context.kernels, target.context.device,
                                            torch.float32), None)  # fmt: skip
    load_weights(model, tmp_path, progress=False)
    model.bind(target)
    assert model.needs == HiddenNeeds((), True) and not model.kv_groups
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 380, (COUNT,), generator=generator).tolist()
    runner = PagedRunner(target, backend, 16, 32)
    runner.prefill({0: ids[:-1]})
    hidden = torch.randn(1, HIDDEN, generator=generator)
    kept, wanted = _reference(folder, assistant, ids, hidden)
    assert len(kept) == 3
    for token, expected in zip([ids[-1], *kept], wanted, strict=False):
        with torch.inference_mode():
            made = model.draft_step(at_the_end(runner, token), hidden)
        logits, hidden = made.logits_RV, made.hidden_RD
        read = logits > -torch.inf
        assert read.sum() == (384 if not clusters else 4 * 384 // clusters)
        assert relative_error(logits[read], expected[0][read]) < 1e-4
        assert relative_error(hidden, expected[1]) < 1e-4
    assert (model.program is None) == (backend != "cpu" or bool(clusters))


def _reference(
    folder: Path, assistant: Any, ids: list[int], hidden: torch.Tensor
) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tokens drafted greedily, and logits and hidden states of each step."""
    model, drafts, made = reference_model(folder), [], []
    with torch.inference_mode():
        out = model(torch.tensor([ids[:-1]]), return_shared_kv_states=True)
        last, hidden = torch.tensor([[ids[-1]]]), hidden[None]
        for _ in range(3):
            embeds = model.get_input_embeddings()(last)
            step = assistant(
                inputs_embeds=torch.cat((embeds, hidden), -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            hidden, last = step.last_hidden_state, step.logits.argmax(-1)
            drafts.append(int(last))
            made.append((step.logits[0], hidden[0]))
    return drafts, made


def test_layers_of_other_shapes_are_not_read(tmp_path: Path) -> None:
    make_assistant(tmp_path, "Gemma4ForCausalLM", 0)
    spec = describe_draft(tmp_path)
    assert spec is not None
    target = load_model(cached_tiny("Gemma4ForCausalLM")).decoder
    assert read_layers(spec, target.blocks) == [4, 5]
    other = load_model(cached_tiny("Gemma4ForCausalLM", global_head_dim=16)).decoder
    assert read_layers(spec, other.blocks) == [4, -1]
