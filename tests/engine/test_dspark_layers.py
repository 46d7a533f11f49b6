"""DSpark layers in the checkpoint of DeepSeek V4: they draft what Hugging Face's layers draft whose
attention reads entries of the model's hidden states, and change no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.speculative.device.block_drafter import BlockDrafter
from tests.engine.drafted_engine import Proposal, note_proposals, small_options
from tests.engine.test_draft_models import generate, rounds  # noqa: F401  (a fixture)
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, copy_tiny, reference_model
from tests.models.reference_math import rms

TARGET, DIM, COUNT, SIZE, RANK, MASK, WINDOW = "DeepseekV4ForCausalLM", 64, 2, 5, 8, 9, 7
TAPS = (1, 3)
KINDS = {"layer_types": ["sliding_attention"] * COUNT, "mlp_layer_types": ["moe"] * COUNT}
KEYS = {
    "dspark_markov_rank": RANK,
    "dspark_block_size": SIZE,
    "dspark_noise_token_id": MASK,
    "dspark_target_layer_ids": list(TAPS),
}
PROMPTS = [[(7 * n + 13 * k) % 370 + 5 for n in range(21 + k)] for k in range(3)]


def with_layers(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with DSpark layers, and the tensors that its layers have besides."""
    copy_tiny(cached_tiny(TARGET), folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    last = f"mtp.{COUNT - 1}."
    own = {
        "mtp.0.main_proj.weight": torch.randn(DIM, COUNT * DIM, generator=generator) * 0.1,
        "mtp.0.main_norm.weight": torch.rand(DIM, generator=generator) + 0.5,
        f"{last}markov_head.markov_w1.weight": torch.randn(VOCAB, RANK, generator=generator),
        f"{last}markov_head.markov_w2.weight": torch.randn(VOCAB, RANK, generator=generator),
        f"{last}confidence_head.proj.weight": torch.randn(1, DIM + RANK, generator=generator),
    }
    renamed = {"model.layers.": "mtp.", "model.norm.": last + "norm."}
    renamed["model.hc_head.hc_"] = last + "hc_head_"
    alone = cached_tiny(TARGET, num_hidden_layers=COUNT, **KINDS)
    for name, tensor in load_file(alone / "model.safetensors").items():
        old = next((old for old in renamed if name.startswith(old)), None)
        if old is not None:
            own[renamed[old] + name.removeprefix(old)] = tensor
    save_file(tensors | own, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | KEYS))
    return folder, own


def tapped(model: Any, text: list[int]) -> Tensor:
    """The means of the streams behind the tapped layers, side by side."""
    seen: dict[int, Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        return lambda *call: seen.__setitem__(layer, call[-1][0].mean(1))

    layers = model.get_decoder().layers
    hooks = [layers[layer].register_forward_hook(note(layer)) for layer in TAPS]
    with torch.inference_mode():
        model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[layer] for layer in TAPS], -1)


def drafts(
    alone: Any, w: dict[str, Tensor], hidden_TN: Tensor, last: int, table: Tensor, head: Tensor
) -> list[int]:
    """Behind the token ``last`` and tokens with these means."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    decoder, begin = alone.get_decoder(), len(hidden_TN)
    low = max(0, begin - WINDOW)
    projected = hidden_TN @ w["mtp.0.main_proj.weight"].T
    context = rms(projected, w["mtp.0.main_norm.weight"], 1e-6)[low:]
    places = torch.arange(low, begin + SIZE)[None]
    cos, sin = decoder.rotary_emb(context[None], places, "main")
    first, block = slice(begin - low), slice(begin - low, None)

    def update(kv: Tensor, _: Tensor, layer: int, **__: Any) -> tuple[Tensor, Tensor]:
        attn = decoder.layers[layer].self_attn
        entries = attn.kv_norm(attn.kv_proj(context))[None, None]
        entries = apply_rotary_pos_emb(entries, cos[:, first], sin[:, first])
        joined = torch.cat((entries, kv), 2)
        return joined, joined

    x = table[torch.tensor([last] + [MASK] * (SIZE - 1))][None, :, None].repeat(1, 1, 3, 1)
    for layer in decoder.layers:
        x = layer(
            x,
            position_embeddings={"main": (cos[:, block], sin[:, block])},
            position_ids=places[:, block],
            attention_mask=None,
            cache=SimpleNamespace(update=update),
        )
    rows = decoder.norm(decoder.hc_head(x))[0]
    tokens, at = [], f"mtp.{COUNT - 1}.markov_head.markov_w"
    for row in rows:
        bias = w[at + "2.weight"] @ w[at + "1.weight"][last]
        last = int((head @ row + bias).argmax())
        tokens.append(last)
    return tokens


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    return note_proposals(monkeypatch, BlockDrafter)


def test_they_draft_what_plain_code_drafts(
    tmp_path: Path,
    proposals: list[Proposal],
    rounds: list[tuple[int, int]],  # noqa: F811
) -> None:
    folder, own = with_layers(tmp_path / "model")
    options = small_options(TARGET) | {"model_path": str(folder), "dtype": "float32"}
    plain = generate(PROMPTS, **options)
    drafting = {"speculative_algorithm": "DSPARK", "speculative_num_steps": SIZE}
    assert generate(PROMPTS, **options, **drafting) == plain
    model = reference_model(cached_tiny(TARGET))
    alone = reference_model(cached_tiny(TARGET, num_hidden_layers=COUNT, **KINDS))
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    texts = [(text, tapped(model, text)) for text in map(list.__add__, PROMPTS, plain)]
    assert len(proposals) > 20
    with torch.inference_mode():
        for at, token, drafted in proposals:
            made = [
                drafts(alone, own, hidden[:at], token, table, head)[: len(drafted)]
                for text, hidden in texts
                if at < len(text) and text[at] == token
            ]
            assert drafted in made


def test_a_model_without_them() -> None:
    options = small_options(TARGET) | {"speculative_algorithm": "DSPARK"}
    with pytest.raises(ConfigError, match="DSPARK: name the folder of a head for this model"):
        generate(PROMPTS, **options)
