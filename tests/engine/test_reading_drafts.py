"""Assistants of Gemma 4 in the engine: they draft what Hugging Face's classes draft behind the same
tokens, whatever drafts were refused before, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.speculative.device.reading_drafter import ReadingDrafter
from tests.engine.test_draft_models import generate, rounds  # noqa: F401
from tests.fakes.assistants import make_assistant
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model

TARGET = "Gemma4ForCausalLM"
PROMPTS = [[(7 * n + 11 * k) % 370 + 5 for n in range(9 + k)] for k in range(2)]
STEPS = 2
# of one slot: tokens that are read, the token behind them, drafts
Proposal = tuple[int, int, int, tuple[int, ...]]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proposal]]:
    seen: list[Proposal] = []
    propose = ReadingDrafter.propose

    def noted(self: ReadingDrafter, tail: Any, lens_R: Any) -> Any:
        made = propose(self, tail, lens_R)
        rows = zip(tail.slots_R.tolist(), tail.positions_R.tolist(), tail.next_tokens_R.tolist(),
                   lens_R.tolist(), made.tokens_RK.tolist(), strict=True)  # fmt: skip
        seen.extend((slot, at, token, tuple(drafts[:n])) for slot, at, token, n, drafts in rows)
        return made

    monkeypatch.setattr(ReadingDrafter, "propose", noted)
    yield seen


@pytest.mark.usefixtures("rounds")
def test_it_drafts_what_the_class_drafts(tmp_path: Path, proposals: list[Proposal]) -> None:
    folder, assistant = cached_tiny(TARGET), make_assistant(tmp_path, TARGET, 0)
    options = {"model_path": str(folder), "page_size": 16, "max_total_tokens": 512}
    options |= {"sampling": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    plain = generate(PROMPTS, **options)
    drafting = {"speculative_algorithm": "NEXTN", "speculative_num_steps": STEPS}
    drafting |= {"speculative_draft_model_path": str(tmp_path), "dtype": "float32"}
    assert generate(PROMPTS, **options, **drafting) == plain
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    model = reference_model(folder)
    checked = 0
    for _, at, token, drafts in proposals:
        known = [one[: at + 1] for one in texts if len(one) > at and one[at] == token]
        if len(drafts) == STEPS:
            assert drafts in {_drafts(model, assistant, ids) for ids in known}
            checked += 1
    assert checked >= 12


def _drafts(model: Any, assistant: Any, ids: list[int]) -> tuple[int, ...]:
    with torch.inference_mode():
        out = model(torch.tensor([ids[:-1]]), output_hidden_states=True,
                    return_shared_kv_states=True)  # fmt: skip
        hidden, last, drafts = out.hidden_states[-1][:, -1:], torch.tensor([[ids[-1]]]), []
        window = model.config.get_text_config().sliding_window
        shared = {
            kind: tuple(t[:, :, -window:] if kind == "sliding_attention" else t for t in pair)
            for kind, pair in out.shared_kv_states.items()
        }
        for _ in range(STEPS):
            embeds = model.get_input_embeddings()(last)
            step = assistant(
                inputs_embeds=torch.cat((embeds, hidden), -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=shared,
            )
            hidden, last = step.last_hidden_state, step.logits.argmax(-1)
            drafts.append(int(last))
    return tuple(drafts)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_assistant(tmp_path, TARGET, 0)
    drafting = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": str(tmp_path)}
    other = cached_tiny(TARGET, global_head_dim=16)
    with pytest.raises(ConfigError, match="keys and values of another shape"):
        generate(PROMPTS, model_path=str(other), **drafting)
