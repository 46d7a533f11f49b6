"""Layers of vision encoders as programs: what the torch layers give, the same bits in any batch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixlm.kernels import cpu
from radixlm.models.encoders.vision_programs import use_programs

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

SHAPE = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80}
PATCHED = {**SHAPE, "num_attention_heads": 4, "image_size": 28, "patch_size": 7}
QWEN = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
GRIDS = ((1, 4, 6), (2, 8, 4), (1, 2, 2))


def clip() -> nn.Module:
    return tf.CLIPVisionModel(tf.CLIPVisionConfig(**PATCHED))


def siglip() -> nn.Module:
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**PATCHED))


def qwen2_vl() -> nn.Module:
    config = tf.Qwen2VLConfig(vision_config={**QWEN, "embed_dim": 48, "hidden_size": 32})
    return tf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(
        config.vision_config
    )


def qwen2_5_vl() -> nn.Module:
    """Some layers see windows of patches alone."""
    own = {**QWEN, **SHAPE, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(vision_config=own)
    return tf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(
        config.vision_config
    )


def qwen3_vl() -> nn.Module:
    own = {**QWEN, **SHAPE, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 2]}
    config = tf.Qwen3VLConfig(vision_config=own)
    return tf.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel(config.vision_config)


def encoder_of(make: Any) -> nn.Module:
    """The encoder as it stands in a model, with drawn weights."""
    torch.manual_seed(0)
    visual = make().eval().requires_grad_(False)
    for weight in visual.parameters():
        weight.copy_(torch.randn_like(weight) * 0.2)
    return nn.ModuleDict({"visual": visual})


def close(ours: Tensor, layers: Tensor) -> bool:
    return bool((ours - layers).abs().max() < 1e-4 * layers.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("make", (clip, siglip))
def test_images(make: Any) -> None:
    """The states after each layer, too."""
    model = encoder_of(make)
    pixels = torch.randn(3, 3, 28, 28)
    want = model["visual"](pixels, output_hidden_states=True)
    assert use_programs(model) == 3
    assert not any(weight.numel() for weight in model["visual"].encoder.layers.parameters())
    got = model["visual"](pixels, output_hidden_states=True)
    assert close(got.last_hidden_state, want.last_hidden_state)
    assert len(got.hidden_states) == 4
    assert all(map(close, got.hidden_states, want.hidden_states))
    layer, x = model["visual"].encoder.layers[0], torch.randn(3, 17, 48)
    assert torch.equal(layer(x[1:2], None), layer(x, None)[1:2]), "alone or among others"


@torch.inference_mode()
def test_padded_images() -> None:
    """Patches that an image has not change nothing; their states are not looked at."""
    layer = encoder_of(siglip)
    first, x = layer["visual"].encoder.layers[0], torch.randn(2, 6, 48)
    has = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = has[:, None, None].expand(2, 1, 6, 6)
    want = first(x, attention_mask=mask)
    use_programs(layer)
    zeros_and_least = torch.zeros(2, 1, 6, 6).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, zeros_and_least):
        assert close(first(x, attention_mask=given)[has], want[has])


@torch.inference_mode()
@pytest.mark.parametrize("make", (qwen2_vl, qwen2_5_vl, qwen3_vl))
def test_packed_images(make: Any) -> None:
    model = encoder_of(make)
    grids = torch.tensor(GRIDS)
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4)
    want = model["visual"](pixels, grid_thw=grids)
    assert use_programs(model) == 3
    got = model["visual"](pixels, grid_thw=grids)
    assert close(got.pooler_output, want.pooler_output)
    for ours, layers in zip(deep(got), deep(want), strict=True):
        assert close(ours, layers)
    x, angles = torch.randn(40, 48), torch.randn(40, 6).repeat(1, 2)
    whole = packed(model["visual"].blocks[0], x, angles, [0, 17, 40])
    assert torch.equal(packed(model["visual"].blocks[0], x[:17], angles[:17], [0, 17]), whole[:17])


def packed(block: nn.Module, x: Tensor, angles: Tensor, starts: list[int]) -> Tensor:
    """What a block makes of the patches of some images; what is around it is torch's."""
    turns = (angles.cos(), angles.sin())
    out: Tensor = block(x, cu_seqlens=torch.tensor(starts), position_embeddings=turns)
    return out


def deep(output: Any) -> list[Tensor]:
    return list(getattr(output, "deepstack_features", None) or ())


@torch.inference_mode()
def test_other_layers_stay() -> None:
    """A layer with the parts of a known form that computes something else, and other dtypes."""
    model = encoder_of(clip)
    layers = model["visual"].encoder.layers
    torch_forward = layers[0].forward
    layers[0].forward = lambda hidden_states, attention_mask: torch_forward(
        hidden_states * 2, attention_mask
    )
    assert use_programs(model) == 0
    layers[0].forward = lambda *args, **kwargs: (torch_forward(*args, **kwargs),)
    layers[0].forward.__signature__ = inspect.signature(torch_forward)
    assert use_programs(model) == 0
    layers[0].forward = torch_forward
    norm = layers[1].layer_norm1
    layers[1].layer_norm1 = nn.LayerNorm(48, bias=False)
    assert use_programs(model) == 0
    layers[1].layer_norm1 = norm
    assert use_programs(model.half()) == 0
    assert all(weight.numel() for weight in layers.parameters())
