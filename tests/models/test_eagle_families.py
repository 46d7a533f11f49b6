"""EAGLE heads with whole blocks compute what one layer of the family's Hugging Face class computes
of the projection's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.models.test_decoder import relative_error
from tests.models.test_drafts import BACKENDS, DIM, ids_and_hidden, kernels_of, loaded, run
from tests.models.test_mtp_families import reference

from radixlm.models.taps import HiddenNeeds

DENSE_LLAMA4 = {"interleave_moe_layer_step": 2, "moe_layers": [], "no_rope_layers": [1]}
# architecture of the head -> of its model, settings of a model with the head's layer only
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "MistralForCausalLMEagle": ("MistralForCausalLM", {"sliding_window": None}),
    "MistralLarge3ForCausalLMEagle": ("Mistral4ForCausalLM", {"first_k_dense_replace": 1}),
    "EagleCohereForCausalLM": ("Cohere2ForCausalLM", {"layer_types": ["sliding_attention"]}),
    "EagleLlama4ForCausalLM": ("Llama4ForCausalLM", DENSE_LLAMA4),
}


def make_head(name: str, prefix: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The class's model with the head's layer only, and the projection that the head adds."""
    architecture, alone = HEADS[name]
    model, generator = cached_tiny(architecture, num_hidden_layers=1, **alone), torch.Generator()
    generator.manual_seed(5)
    own = {"fc.weight": torch.randn(DIM, 2 * DIM, generator=generator) * 0.1}
    if "Cohere" in name:
        own["fc.bias"] = torch.randn(DIM, generator=generator)
    held = load_file(model / "model.safetensors")
    stored = {prefix + n: t for n, t in own.items()}
    stored |= {
        prefix + n.removeprefix("model."): t
        for n, t in held.items()
        if n.startswith(("model.layers.", "model.norm."))
    }
    stored["lm_head.weight"] = torch.zeros(384, DIM)  # of a trainer; the model's is used
    save_file(stored, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_with_whole_blocks(name: str, backend: str, tmp_path: Path) -> None:
    alone, own = make_head(name, "model." if "Cohere" in name else "", tmp_path)
    target = load_model(cached_tiny(HEADS[name][0]), kernels_of(backend))
    model = loaded(tmp_path, target, backend)
    assert model.needs == HiddenNeeds((), True)
    ids, hidden = ids_and_hidden()
    logits, passed = run(model, backend, ids, model.combine(hidden))
    both = torch.cat((target.embed.run(torch.tensor(ids)), hidden), -1)
    joined = both @ own["fc.weight"].T + own.get("fc.bias", torch.zeros(DIM))
    normed, _ = reference(alone, joined[:, None])
    assert relative_error(logits, target.logits(normed)) < 1e-4
    assert relative_error(passed, normed) < 1e-4
