"""Draft models: their parts, and the names of their tensors in published checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from radixlm.arch.config_defaults import defaults
from radixlm.arch.draft import MaskedBlock, TokenState, at_step, tapped_layers
from radixlm.arch.hf import describe, describe_draft
from radixlm.arch.names import spellings
from radixlm.arch.registry import DRAFTS, MTP_LAYERS
from radixlm.arch.spec import Attention, LatentAttention, Mlp, Moe
from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.models.build import build_model
from radixlm.weights.mapper import WeightsMapper
from tests.fakes.shapes import LATENT, ROUTED

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": True}
NEXT = {**EXPERTS, "shared_expert_intermediate_size": 24, "head_dim": 16}
LONGCAT = {
    **LATENT,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
DSA = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
DSA |= {"indexer_types": ["full", "shared"] * 2}
V4 = {"head_dim": 16, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 12, "hc_mult": 3}
V4 |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
V4 |= {"sliding_window": 8, "index_n_heads": 4, "index_head_dim": 12, "index_topk": 3}
V4 |= {"qk_rope_head_dim": 8}
MIMO_V2 = {"head_dim": 24, "v_head_dim": 12, "sliding_window": 8, "n_routed_experts": 4}
MIMO_V2 |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NEMOTRON = {**SHAPE, "num_hidden_layers": 2, "head_dim": 16, "hybrid_override_pattern": "M*"}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 24, "mtp_hybrid_override_pattern": "*E"}
STEP = {"head_dim": 16, "sliding_window": 8, "num_sliding_attention_heads": 6}
STEP |= {"layer_types": ["full_attention", *["sliding_attention"] * 5], "moe_layers_enum": "1,2,3"}
STEP |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STEP |= {"share_expert_dim": 24, "swiglu_limits_shared": [0.0, 0.0, 0.1, 0.0, 0.2, 0.2]}
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
# architecture -> (config, tensors outside the blocks, one tensor of a block)
CASES: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "DeepseekV3ForCausalLM": (
        {**SHAPE, **LATENT, **ROUTED},
        {f"model.layers.4.{part}.weight" for part in NEXTN},
        "model.layers.4.mlp.experts.3.down_proj.weight",
    ),
    "DeepseekV4ForCausalLM": (
        {**SHAPE, **V4},
        {
            *(f"mtp.0.{part}.weight" for part in ("e_proj", "h_proj", "enorm", "hnorm", "norm")),
        },
        "mtp.0.ffn.experts.3.w2.weight",
    ),
    "GlmMoeDsaForCausalLM": (
        {**SHAPE, **LATENT, **ROUTED, **DSA},
        {f"model.layers.4.{part}.weight" for part in NEXTN},
        "model.layers.4.self_attn.indexer.wq_b.weight",
    ),
    "Glm4MoeForCausalLM": (
        {**SHAPE, **ROUTED, "head_dim": 16},
        {f"model.layers.4.{part}.weight" for part in NEXTN},
        "model.layers.4.self_attn.q_proj.weight",
    ),
    "BailingMoeV2ForCausalLM": (
        {**SHAPE, **EXPERTS, "head_dim": 16},
        {f"model.layers.4.{p}.weight" for p in ("eh_proj", "enorm", "hnorm", "final_layernorm")},
        "model.layers.4.attention.query_key_value.weight",
    ),
    "Ernie4_5_MoeForCausalLM": (
        {**SHAPE, **ERNIE},
        {
            *(f"model.mtp_{part}.0.weight" for part in ("linear_proj", "emb_norm", "hidden_norm")),
            "model.mtp_linear_proj.0.bias",
        },
        "model.mtp_block.0.mlp.gate_proj.weight",
    ),
    "HYV4ForCausalLM": (
        {**SHAPE, **LATENT, **ROUTED, **DSA, "hc_mult": 2},
        {f"model.mtp_layers.0.{part}.weight" for part in (*NEXTN[:3], "final_layernorm")},
        "model.mtp_layers.0.self_attn.indexer.wq_b.weight",
    ),
    "MiMoForCausalLM": (
        SHAPE,
        {
            f"model.mtp_layers.0.{part}.weight"
            for part in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        },
        "model.mtp_layers.0.self_attn.q_proj.bias",
    ),
    "Qwen3NextForCausalLM": (
        {**SHAPE, **NEXT},
        {f"mtp.{p}.weight" for p in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        "mtp.layers.0.mlp.shared_expert.up_proj.weight",
    ),
    "LongcatFlashForCausalLM": (
        LONGCAT,
        {
            *(f"model.mtp.layers.0.{part}.weight" for part in ("eh_proj", "enorm.m", "hnorm.m")),
            "model.mtp.norm.weight",
        },
        "model.mtp.layers.0.transformer_layer.mlp.down_proj.weight",
    ),
    "MiMoV2FlashForCausalLM": (
        {**SHAPE, **MIMO_V2},
        {f"model.mtp.layers.0.{p}.weight" for p in (*NEXTN[:3], "final_layernorm")},
        "model.mtp.layers.0.self_attn.q_proj.weight",
    ),
    "NemotronHForCausalLM": (
        NEMOTRON,
        {
            *(f"mtp.layers.0.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")),
            "mtp.layers.1.final_layernorm.weight",
        },
        "mtp.layers.1.mixer.experts.3.up_proj.weight",
    ),
    "Step3p5ForCausalLM": (
        {**SHAPE, **STEP},
        {
            *(f"model.layers.4.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")),
            "model.layers.4.transformer.shared_head.norm.weight",
        },
        "model.layers.4.self_attn.g_proj.weight",
    ),
    "LlamaForCausalLMEagle": (
        {**SHAPE, "num_hidden_layers": 1},
        {"fc.weight", "fc.bias"},
        "layers.0.self_attn.k_proj.weight",
    ),
    "Qwen2ForCausalLMEagle": (
        {**SHAPE, "num_hidden_layers": 1, "bias": False, "model_type": "qwen2"},
        {"fc.weight"},
        "layers.0.self_attn.k_proj.bias",
    ),
    "LlamaForCausalLMEagle3": (
        {**SHAPE, "num_hidden_layers": 1, "draft_vocab_size": 40},
        {
            *("fc.weight", "norm.weight", "lm_head.weight", "d2t"),
            *("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"),
        },
        "midlayer.mlp.up_proj.weight",
    ),
}


def _config(architecture: str, **changes: Any) -> dict[str, Any]:
    config = CASES[architecture][0]
    count = {} if architecture in DRAFTS else {"num_nextn_predict_layers": 1}
    return {"architectures": [architecture], **config, **count, **changes}


def _joint(draft: Any) -> set[str]:
    """Names of the draft's own tensors outside its blocks."""
    decoder = at_step(draft, 0)
    roles = [role for role in decoder.names if role.startswith("draft.")]
    roles += ["norm"] * draft.decoder.norm.affine + ["head"] * draft.owns_head
    roles = [role for role in roles if role != "draft.taps_norm" or draft.taps_norm]
    roles = [role for role in roles if "tap_norms" not in role]
    found = {spellings(decoder.names, role)[0].templates[0] for role in roles}
    found = {name if name == "d2t" else f"{name}.weight" for name in found}
    if draft.join_bias:
        found.add(spellings(decoder.names, "draft.join")[0].templates[0] + ".bias")
    return found


def _of_block(draft: Any, step: int = 0) -> set[str]:
    """Names of the tensors of the module's blocks."""
    decoder = at_step(draft, step)
    model = build_model(decoder, torch.device("cpu"), torch.float32, bind("cpu"))
    resolver, found = WeightsMapper(decoder, ()), set()
    for path, layer in model.layers():
        if path.startswith("blocks."):
            for name in layer.own_params():
                found |= set(resolver.mapping(path, name).names())
    return found


@pytest.mark.parametrize("architecture", CASES)
def test_tensors_have_their_published_names(architecture: str) -> None:
    draft = describe_draft(_config(architecture))
    assert draft is not None and draft.modules == 1
    _, joint, of_block = CASES[architecture]
    assert _joint(draft) == joint
    names = _of_block(draft)
    assert of_block in names and not names & joint
    prefix = of_block.partition(".self_attn")[0].partition(".mlp")[0].partition(".attention")[0]
    prefix = prefix.removesuffix(".transformer_layer").partition(".1.mixer")[0].partition(".ffn")[0]
    assert all(name.startswith(prefix + ".") for name in names)


def test_the_parts_of_draft_models() -> None:
    found = {name: describe_draft(_config(name)) for name in CASES}
    block = {name: draft.decoder.blocks[0] for name, draft in found.items()}
    assert isinstance(block["DeepseekV3ForCausalLM"].ffn, Moe)
    assert isinstance(block["DeepseekV3ForCausalLM"].mixer, LatentAttention)
    assert isinstance(block["Ernie4_5_MoeForCausalLM"].ffn, Mlp)
    assert isinstance(block["Qwen3NextForCausalLM"].mixer, Attention)
    assert found["Qwen3NextForCausalLM"].embed_norm.offset == 1.0
    assert found["MiMoForCausalLM"].order == "hidden embed"
    assert found["MiMoForCausalLM"].blanks_first
    norm2 = "model.mtp.layers.0.pre_mlp_layernorm.weight"
    assert norm2 in _of_block(found["MiMoV2FlashForCausalLM"])
    assert found["Step3p5ForCausalLM"].hidden_norm.offset == 1.0
    assert block["Step3p5ForCausalLM"].ffn.limit == 0.2
    for name in ("MiMoV2FlashForCausalLM", "Step3p5ForCausalLM"):
        assert block[name].mixer.window == 8 and isinstance(block[name].ffn, Mlp)
        assert tapped_layers(found[name], 4) == (3,) and not found[name].passes_normed
    assert [type(b.mixer or b.ffn) for b in found["NemotronHForCausalLM"].decoder.blocks] == [
        Attention,
        Moe,
    ]
    assert block["LlamaForCausalLMEagle"].layout == "prenorm_ffn_only"
    third = found["LlamaForCausalLMEagle3"]
    assert (third.taps, third.is_projected, third.has_vocab_map) == (3, False, True)
    assert third.decoder.vocab == 40
    assert tapped_layers(third, 32) == (1, 15, 28)


def test_a_config_of_speculators_reads_as_the_head_s_own() -> None:
    own = _config("LlamaForCausalLMEagle3", eagle_config=_listed(0, 2, 3))
    layer = {k: v for k, v in own.items() if k not in ("architectures", "eagle_config")}
    raw = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # the layers that the outputs lead to
    }
    assert describe_draft(raw) == describe_draft(own)
    assert describe_draft({**raw, "norm_before_residual": True}).residual_is_normed
    with pytest.raises(CheckpointError, match=r"speculators_model_type.*xpress.*'eagle3', 'mtp'"):
        describe_draft({**raw, "speculators_model_type": "xpress"})
    with pytest.raises(CheckpointError, match=r"transformer_layer_config.*'llama'; known: qwen3,"):
        describe_draft({**raw, "speculators_model_type": "mtp"})


def test_blocks_of_masks() -> None:
    own = {"mask_token_id": 9, "target_layer_ids": [1, 4]}
    raw = {**SHAPE, "architectures": ["DFlashDraftModel"], "dflash_config": own, "block_size": 10}
    found = describe_draft(raw)
    assert (found.block, found.tap_layers) == (MaskedBlock(10, 9), (1, 4))
    assert (found.block.num_drafts, found.decoder.blocks[0].mixer.extras) == (9, None)
    kinds = ["full_attention", "sliding_attention"] * 2
    local = describe_draft({**raw, "layer_types": kinds, "sliding_window": 7})
    whole, window = (block.mixer for block in local.decoder.blocks[:2])
    assert whole.extras is None and (window.window, window.extras.is_causal) == (7, True)
    both = describe_draft({**raw, "layer_types": kinds, "sliding_window": 7, "is_causal": False})
    assert both.decoder.blocks[1].mixer.extras is None
    trained = {**raw, "dflash_config": {**own, "causal": True}}
    causal = describe_draft(trained)
    assert causal.decoder.blocks[0].mixer.extras.is_causal
    causal = describe_draft({**raw, "is_causal": True})
    assert causal.decoder.blocks[0].mixer.extras.is_causal
    unnamed = {**raw, "dflash_config": {"mask_token_id": 9}, "num_target_layers": 36}
    assert describe_draft(unnamed).tap_layers == (1, 12, 22, 33)  # as the authors choose them
    assert describe_draft({**unnamed, "num_hidden_layers": 1}).tap_layers == (18,)
    spark = {**raw, "architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "block_size": 7}
    block = describe_draft({**spark, "markov_head_type": "RNN"}).block
    assert block == MaskedBlock(7, 9, True, markov="rnn", markov_rank=8)
    assert block.num_drafts == 7
    assert describe_draft({**spark, "architectures": ["LingDSparkModel"]}) == describe_draft(spark)


def test_a_head_of_minimax_has_dense_layers_whose_windows_see_both_ways() -> None:
    held = {
        **SHAPE, "head_dim": 16, "rotary_dim": 8, "use_gemma_norm": True,
        "dspark_ffn_hidden_size": 48,
        "layer_types": ["sliding_attention"] * 4, "sliding_window": 7, "moe_layer_freq": [0] * 4,
        "sparse_attention_config": None, "dspark_block_size": 7, "dspark_markov_rank": 8,
        "dspark_noise_token_id": 9, "dspark_target_layer_ids": [1, 3],
    }  # fmt: skip
    raw = {"architectures": ["DSparkMiniMaxDraftModel"], "text_config": held}
    found = describe_draft(raw)
    assert found is not None and found.tap_layers == (1, 3) and found.hidden_norm.offset == 1
    assert found.block == MaskedBlock(7, 9, True, markov="vanilla", markov_rank=8)
    layer = found.decoder.blocks[0]
    assert (layer.mixer.window, layer.mixer.extras, layer.mixer.rope.dim) == (7, None, 8)
    assert (layer.ffn.inner, layer.ffn.act, layer.ffn.limit) == (48, "swiglu_oai", 7)
    at = "language_model.model.dspark."
    assert f"{at}layers.3.decoder_layer.mlp.down_proj.weight" in _of_block(found)
    assert {f"{at}final_norm.weight", f"{at}markov_head.markov_w1.weight"} <= _joint(found)
    for key, value in (("moe_layer_freq", [0, 0, 1, 0]), ("use_gemma_norm", False)):
        with pytest.raises(CheckpointError, match=key):
            describe_draft({**raw, "text_config": {**held, key: value}})


def test_heads_of_lfm_have_no_convolutions() -> None:
    raw = {**SHAPE, "architectures": ["Lfm2DSparkDraftModel"], "markov_rank": 8}
    raw |= {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    with pytest.raises(CheckpointError, match=r"'layer_types' names \['conv'\]"):
        describe_draft(raw)


def test_blocks_with_convolutions() -> None:
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 4}
    mask = {"mask_token_id": 9, "block_size": 8, "target_layer_ids": [1]}
    raw = {**SHAPE, "architectures": ["DFlash2DraftModel"], "dflash_config": mask | own}
    found = describe_draft(raw)
    block = MaskedBlock(
        8, 9, selector_rank=6, num_candidates=4, conv_taps=2, conv_group=16
    )  # fmt: skip
    assert found.block == block
    layer = {**SHAPE, "model_type": "qwen3"}
    stored = {"speculators_model_type": "dflash2", "transformer_layer_config": layer, **own}
    stored |= {"mask_token_id": 9, "block_size": 8, "aux_hidden_state_layer_ids": [2]}
    other = describe_draft(stored)
    assert (other.block, other.tap_layers) == (block, found.tap_layers)
    with pytest.raises(CheckpointError, match="no positive 'selector_rank'"):
        describe_draft({**stored, "selector_rank": 0})
    with pytest.raises(CheckpointError, match=r"conv_group_size.*must divide 'hidden_size' = 64"):
        describe_draft({**stored, "conv_group_size": 48})


def test_heads_of_one_token_each() -> None:
    """Their authors' config has neither architecture nor sizes."""
    found = describe_draft({"medusa_num_heads": 3, "medusa_num_layers": 2})
    assert (found.modules, found.layers.count, found.decoder.blocks) == (3, 2, ())
    named = {"architectures": ["MedusaModel"], "hidden_size": 8, "vocab_size": 9, "num_heads": 4}
    found = describe_draft(named)
    assert (found.modules, found.decoder.dim, found.decoder.vocab) == (4, 8, 9)
    cut = describe_draft({**named, "truncated_vocab_size": 5})
    assert (cut.decoder.vocab, cut.target_vocab, cut.has_vocab_map) == (5, 9, True)
    with pytest.raises(CheckpointError, match=r"truncated_vocab_size.* in 1 to 9"):
        describe_draft({**named, "truncated_vocab_size": 10})


def test_heads_that_pass_a_state() -> None:
    raw = {"model_type": "mlp_speculator", "vocab_size": 9, "emb_dim": 8, "n_predict": 2}
    found = describe_draft(raw)
    assert (found.modules, found.decoder.dim, found.target_dim) == (2, 8, 8)
    weight = math.sqrt((1 - 0.5**0.5) * 4) / 0.5**0.25
    assert found.state == TokenState(pytest.approx(weight))
    wide = describe_draft({**raw, "inner_dim": 12, "scale_input": True})
    assert (wide.decoder.dim, wide.target_dim, wide.state.norms_first) == (12, 8, True)


def test_masks_stand_for_drafts() -> None:
    raw = _config("LlamaForCausalLMEagle3") | {"architectures": ["PEagleSpeculator"]}
    assert describe_draft({**raw, "mask_token_id": 7}).mask == 7
    with pytest.raises(CheckpointError, match="mask_token_id' is missing"):
        describe_draft(raw)
    chain = _config("LlamaForCausalLMEagle3")
    assert describe_draft({**chain, "mask_token_id": 7}).mask is None
    assert describe_draft({**chain, "ptd_token_id": 7}).mask == 7


def test_blocks_of_speculators() -> None:
    """Their config lists the layers that the outputs lead to; the vocabulary may be smaller."""
    raw = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**SHAPE, "model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [1, 4],
        "block_size": 6,
        "mask_token_id": 9,
        "draft_vocab_size": 40,
    }
    found = describe_draft(raw)
    assert (found.block, found.tap_layers) == (MaskedBlock(6, 9), (0, 3))
    assert (found.decoder.vocab, found.target_vocab, found.has_vocab_map) == (40, 128, True)
    kinds = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}
    kinds |= {"sliding_window_non_causal": True, "markov_rank": 8}
    spark = describe_draft({**raw, "speculators_model_type": "dspark", **kinds})
    assert spark.block == MaskedBlock(6, 9, True, markov="vanilla", markov_rank=8)
    assert spark.decoder.blocks[0].mixer.window == 7
    assert spark.decoder.blocks[0].mixer.extras is None
    assert not describe_draft({**raw, "sample_from_anchor": False}).block.tells_next


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "dflash_config.*mask_token_id"),
        ({"dflash_config": {"mask_token_id": 128, "target_layer_ids": [1]}}, "below 128"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids.*num_target_layers"),
        ({"block_size": 1}, "block_size.*at least 2"),
        ({"architectures": ["DSparkDraftModel"]}, "markov_rank.*positive"),
        (
            {"architectures": ["DSparkDraftModel"], "markov_rank": 2, "markov_head_type": "x"},
            "markov_head_type.*'vanilla', 'gated' or 'rnn'",
        ),
    ],
)
def test_blocks_that_cannot_be(changes: dict[str, Any], named: str) -> None:
    own = {"mask_token_id": 9, "target_layer_ids": [1, 4]}
    raw = {**SHAPE, "architectures": ["DFlashDraftModel"], "dflash_config": own, **changes}
    with pytest.raises(CheckpointError, match=named):
        describe_draft(raw)


def test_hidden_states_that_an_eagle3_head_reads() -> None:
    without = {"use_aux_hidden_state": False}
    assert describe_draft(_config("LlamaForCausalLMEagle3", eagle_config=without)).taps == 0
    two = describe_draft(_config("LlamaForCausalLMEagle3", eagle_config=_listed(0, 3)))
    assert (two.taps, two.tap_layers) == (2, (0, 3))


READS_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "Qwen3_5ForConditionalGeneration": (
        {"head_dim": 16, "mtp_num_hidden_layers": 1, "model_type": "qwen3_5_text"},
        {"model_type": "qwen3_5"},
        {},
        "mtp.norm.weight",
    ),
    "GlmOcrForConditionalGeneration": (
        {"head_dim": 16, "num_nextn_predict_layers": 1, "model_type": "glm_ocr_text"},
        {"model_type": "glm_ocr"},
        {},
        "model.layers.4.shared_head.norm.weight",
    ),
    "Exaone4_5_ForConditionalGeneration": (
        {"head_dim": 16, "model_type": "exaone4", "sliding_window": 8,
         "layer_types": ["sliding_attention", *["full_attention"] * 3]},
        {"model_type": "exaone4_5", "num_nextn_predict_layers": 1},
        {"layer_types": ["sliding_attention"], "num_hidden_layers": 1},
        "mtp.norm.weight",
    ),
    "MiniMaxM3SparseForConditionalGeneration": (
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "num_mtp_modules": 1, "model_type": "minimax_m3_vl_text",
         "sparse_attention_config": {"sparse_index_dim": 16, "sparse_num_index_heads": 2,
                                     "sparse_attention_freq": [0, 0, 1, 1]}},
        {"model_type": "minimax_m3_vl"},
        {},
        "model.mtp.layers.0.final_layernorm.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", READS_IMAGES)
def test_prediction_layers_of_a_model_that_reads_images(architecture: str) -> None:
    """They are beside its language model, and one is like the last of the text model's layers, or
    like the first of one with the settings in the middle."""
    text, whole, like, norm = READS_IMAGES[architecture]
    whole = {"architectures": [architecture], **whole, "vision_config": {}}
    draft = describe_draft({**whole, "text_config": {**SHAPE, **text}})
    target = describe({**whole, "text_config": {**SHAPE, **text, **like}})
    assert draft is not None and draft.modules == 1 and norm in _joint(draft)
    assert draft.decoder.blocks == (target.blocks[:1] if like else target.blocks[-1:])


def test_a_checkpoint_of_prediction_layers_has_the_defaults_of_its_model() -> None:
    """vLLM's name of the type, which transformers does not know."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    raw = {**SHAPE, **experts, "architectures": ["MiniMaxM3MTP"], "model_type": "minimax_m3_mtp"}
    draft, same = (
        describe_draft({**raw, "model_type": name})
        for name in ("minimax_m3_mtp", "minimax_m3_vl_text")
    )
    assert draft == same and draft is not None
    assert draft.decoder.blocks[0].mixer.rope.theta == 5e6


def _listed(*layers: int) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": list(layers)}


def test_each_of_several_modules_has_its_own_names() -> None:
    draft = describe_draft(_config("DeepseekV3ForCausalLM", num_nextn_predict_layers=2))
    assert draft is not None and draft.modules == 2
    assert not _of_block(draft, 0) & _of_block(draft, 1)
    assert "model.layers.5.self_attn.o_proj.weight" in _of_block(draft, 1)


@pytest.mark.parametrize("target", sorted(set(CASES) & set(MTP_LAYERS)))
def test_the_draft_s_own_architecture_describes_the_same(target: str) -> None:
    row = MTP_LAYERS[target]
    names = [name for name, other in DRAFTS.items() if other == row]
    name = next((n for n in names if n.startswith(target)), names[0])
    raw = _config(target)
    alone = describe_draft({**raw, "architectures": [name], "model_type": _type_of(target)})
    assert alone == describe_draft({**raw, "model_type": _type_of(target)})
    with pytest.raises(CheckpointError, match="is a draft"):
        describe({**raw, "architectures": [name], "model_type": _type_of(target)})


def _type_of(architecture: str) -> str:
    return next(name for name, held in defaults().items() if held["architecture"] == architecture)


def test_a_config_without_a_draft_model() -> None:
    assert describe_draft({"architectures": ["LlamaForCausalLM"], **SHAPE}) is None
    assert describe_draft(_config("DeepseekV3ForCausalLM", num_nextn_predict_layers=0)) is None
