"""Every architecture through the paged path equals Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.mechanisms import REPRESENTATIVES, mechanisms
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny, copy_tiny, reference_model

from radixlm.arch.hf import describe
from radixlm.step.batch import InputEmbeds

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


def test_every_mechanism_has_a_family() -> None:
    """Most tests run `REPRESENTATIVES` only."""
    found = {arch: mechanisms(describe(cached_tiny(arch))) for arch in ARCHITECTURES}
    covered = set().union(*(found[arch] for arch in REPRESENTATIVES))
    missing = {arch: one - covered for arch, one in found.items() if one - covered}
    assert not missing, "add families to tests/fakes/mechanisms.py"


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {**YARN, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.3 * i for i in range(8)],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize(
    ("arch", "kind"), [*(("LlamaForCausalLM", k) for k in ROPES), ("Phi3ForCausalLM", "longrope")]
)
@pytest.mark.parametrize("length", [12, 29])
def test_scaled_ropes_equal_hugging_face(arch: str, kind: str, length: int) -> None:
    """Below and above the original context; chunks use the sequence's final length."""
    changes = {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    if kind == "longrope":
        changes["original_max_position_embeddings"] = 16
    folder = cached_tiny(arch, rope_parameters=ROPES[kind], **changes)
    model = load_model(folder)
    ids = prompts(model.decoder.vocab, (length,))
    ours = PagedRunner(model, final_len=length).prefill(ids, num_chunks=2)[0]
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids[0]])).logits[0].float()
    assert relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4, "hidden_size": 72, "head_dim": 18}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "vocab_size": 131}),
        ("Qwen3ForCausalLM", {"head_dim": 80, "num_hidden_layers": 1}),
        ("Gemma3ForCausalLM", {"head_dim": 256, "sliding_window": 16}),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": None, "kv_lora_rank": 24, "v_head_dim": 12}),
        ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 3, "qk_nope_head_dim": 10}),
        ("GptOssForCausalLM", {"sliding_window": 1, "head_dim": 16}),
        ("GptOssForCausalLM", {"swiglu_limit": 0.5}),
        ("AfmoeForCausalLM", {"attention_bias": True}),
        ("ApertusForCausalLM", {"hidden_act": "gelu"}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "num_experts_per_tok": 5}),
        ("OlmoForCausalLM", {"clip_qkv": 0.3}),
        ("OlmoeForCausalLM", {"clip_qkv": 0.3}),
        ("BloomForCausalLM", {"n_head": 7, "hidden_size": 56}),
        ("MptForCausalLM", {"n_heads": 5, "d_model": 40}),
        ("OlmoHybridForCausalLM", {"rope_parameters": {"rope_theta": None}}),
    ],
)
def test_unusual_shapes_equal_hugging_face(arch: str, changes: dict[str, Any]) -> None:
    folder = cached_tiny(arch, seed=7, **changes)
    model = load_model(folder)
    ids = prompts(model.decoder.vocab, (21, 1), seed=3)
    ours = PagedRunner(model, page_size=3).prefill(ids, num_chunks=2)
    for sequence, tokens in ids.items():
        with torch.inference_mode():
            theirs = reference_model(folder)(torch.tensor([tokens])).logits[0].float()
        assert relative_error(ours[sequence], theirs) < 1e-4


@pytest.mark.parametrize("arch", ["Gemma3ForCausalLM", "GptOssForCausalLM", "MistralForCausalLM"])
def test_merged_windows_change_nothing_but_the_pools(arch: str) -> None:
    folder = cached_tiny(arch)
    apart, merged = load_model(folder), load_model(folder, merge_windows=True)
    assert "window" in {g.name for g in apart.kv_groups}
    assert [g.name for g in merged.kv_groups] == ["full"]
    ids = prompts(apart.decoder.vocab)
    one = PagedRunner(apart).prefill(ids, 2)
    other = PagedRunner(merged).prefill(ids, 2)
    for sequence in ids:
        torch.testing.assert_close(one[sequence], other[sequence], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "OPTForCausalLM"])
def test_given_embeddings_replace_those_of_the_table(arch: str) -> None:
    """Embeddings of other tokens, given for some rows, act like those tokens."""
    model = load_model(cached_tiny(arch))
    (ids,) = prompts(model.decoder.vocab, (14,)).values()
    swapped = [*ids[:5], 7, 8, 9, *ids[8:]]
    with torch.inference_mode():
        embeds = model.embed.run(torch.tensor(swapped))
    mask = torch.zeros(14, dtype=torch.bool)
    mask[5:8] = True
    plain = PagedRunner(model).step({0: swapped})[0]
    given = PagedRunner(model).step({0: ids}, embeds=InputEmbeds(embeds, mask))[0]
    torch.testing.assert_close(given, plain)
    before = embeds.clone()
    whole = PagedRunner(model).step({0: ids}, embeds=InputEmbeds(embeds))[0]
    torch.testing.assert_close(whole, plain)
    assert torch.equal(embeds, before), "the caller's tensor must not change"


def test_sixteen_bit_weights_are_those_weights_in_float32() -> None:
    folder = cached_tiny("Qwen3ForCausalLM", dtype=torch.bfloat16)
    packed, widened = load_model(folder), load_model(folder, weight_dtype=torch.float32)
    ids = prompts(packed.decoder.vocab)
    one, other = PagedRunner(packed).prefill(ids), PagedRunner(widened).prefill(ids)
    for sequence in ids:
        torch.testing.assert_close(one[sequence], other[sequence], rtol=1e-6, atol=1e-6)


def test_a_nudged_weight_is_seen(tmp_path: Path) -> None:
    """The comparison above can fail."""
    folder = copy_tiny(cached_tiny("LlamaForCausalLM"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1.0
    save_file(tensors, folder / "model.safetensors")
    ids = prompts(384, (12,))
    ours = PagedRunner(load_model(folder)).prefill(ids)[0]
    with torch.inference_mode():
        theirs = reference_model(cached_tiny("LlamaForCausalLM"))(torch.tensor([ids[0]])).logits[0]
    assert relative_error(ours, theirs.float()) > 1e-3
