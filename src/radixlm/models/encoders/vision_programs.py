"""Layers of vision encoders on the CPU kernels.

The layers of a Hugging Face encoder whose parts have a known form become the parts of one program;
what is around them stays in torch. They are taken only if each gives what the torch layer gives for
drawn rows; its own weights are then dropped.

Legend: B images, N patches of an image, T packed patches, S sequences, D channels, R half a head.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.arch.spec import Activation, Attention, Block, Mlp, Norm, Rope
from radixlm.base.errors import InvariantError
from radixlm.base.record import Record
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.linear import Linear
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.program import Unsupported
from radixlm.models.encoders.program import EncoderProgram

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # of the largest number of a layer's output: a layer that is far off is another
ACTIVATIONS: dict[str, Activation] = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELUActivation": "gelu_quick",
    "SiLUActivation": "silu",
}


class Form(Record):
    """The names of a layer's parts."""

    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]  # or gate and up
    down: str
    act: str

    @property
    def leaves(self) -> set[str]:
        return {*self.norms, *self.qkv, self.out, *self.up, self.down, self.act}


_NORMS, _QKV, _OUT = ("norm1", "norm2"), ("attn.qkv",), "attn.proj"
_CLIP_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FORMS = (
    Form(
        ("layer_norm1", "layer_norm2"), _CLIP_QKV, "self_attn.out_proj", ("mlp.fc1",), "mlp.fc2",
        "mlp.activation_fn",
    ),
    Form(_NORMS, _QKV, _OUT, ("mlp.fc1",), "mlp.fc2", "mlp.act"),
    Form(_NORMS, _QKV, _OUT, ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn"),
    Form(_NORMS, _QKV, _OUT, ("mlp.linear_fc1",), "mlp.linear_fc2", "mlp.act_fn"),
)  # fmt: skip


@torch.inference_mode()
def use_programs(model: nn.Module) -> int:
    """Give the layers of the model's vision encoders, in float32 on a CPU, programs to run. Returns
    how many got one."""
    if not cpu.available:
        return 0
    count = 0
    for path, layers in model.named_modules():
        if "vis" in path and isinstance(layers, nn.ModuleList):
            try:
                count += _use_program(list(layers))
            except Unsupported as reason:
                log.debug("%s runs in torch: the C++ program has no %s", path, reason)
    return count


def _use_program(layers: Sequence[nn.Module]) -> int:
    weights = [weight for layer in layers for weight in layer.parameters()]
    if not weights or any(
        one.dtype != torch.float32 or one.device.type != "cpu" for one in weights
    ):
        raise Unsupported("weights that are not float32 on a CPU")
    adapt = _adapter_of(layers[0])
    blocks = [[_block(layer)] for layer in layers]
    program = EncoderProgram(blocks, blocks[0][0].norm1.shape[0])
    forwards = [partial(adapt, program, index) for index in range(len(layers))]
    for layer, forward, block in zip(layers, forwards, blocks, strict=True):
        _check(layer, forward, block[0])
    for layer, forward in zip(layers, forwards, strict=True):
        for weight in layer.parameters():
            weight.data = weight.data.new_empty(0)
        layer.forward = forward
    return len(layers)


def _adapter_of(layer: nn.Module) -> Callable[..., Tensor]:
    """What takes the arguments of the layer's forward."""
    names = {*inspect.signature(layer.forward).parameters} - {"kwargs", "rotary_pos_emb"}
    if names == {"hidden_states", "attention_mask"}:
        return _of_images
    if names == {"hidden_states", "cu_seqlens", "position_embeddings"}:
        return _of_packed
    raise Unsupported(f"layers of {sorted(names)}")


def _of_images(
    program: EncoderProgram,
    part: int,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """[B, N, D]. ``attention_mask`` [B, 1, N or 1, N]: the patches that the image has, True or 0;
    the states of others stay as they are. InvariantError: patches of one image see others."""
    has_BN = torch.ones(hidden_states.shape[:2], dtype=torch.bool)
    if attention_mask is not None:
        mask_BQN = attention_mask[:, 0]
        if not bool((mask_BQN == mask_BQN[:, :1]).all()):
            raise InvariantError("a vision encoder whose patches of one image see others")
        has_BN = (mask_BQN if mask_BQN.dtype == torch.bool else mask_BQN == 0)[:, 0]
    starts_S1 = torch.nn.functional.pad(has_BN.sum(1).cumsum(0), (1, 0))
    out_BND = hidden_states.clone()
    out_BND[has_BN] = program.run(hidden_states[has_BN], starts_S1, part=part)
    return out_BND


def _of_packed(
    program: EncoderProgram,
    part: int,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """[T, D]. ``cu_seqlens`` [S + 1]; ``position_embeddings``: cosines and sines [T, 2R] of which
    both halves are the same."""
    halves = [angles.float().chunk(2, -1)[0] for angles in position_embeddings]
    return program.run(hidden_states, cu_seqlens, [(torch.cat(halves, -1), True)], part)


def _block(layer: nn.Module) -> BlockLayer:
    """The layer with its weights packed."""
    leaves: dict[str, Any] = {
        name: part for name, part in layer.named_modules() if not list(part.children())
    }
    form = next((form for form in FORMS if form.leaves == leaves.keys()), None)
    if form is None:
        raise Unsupported(f"layers of {sorted(leaves)}")
    heads = getattr(layer.get_submodule(form.out.rpartition(".")[0]), "num_heads", 0)
    act = ACTIVATIONS.get(type(leaves[form.act]).__name__)
    dim = leaves[form.out].out_features
    if act is None or not heads:
        raise Unsupported(f"layers with {type(leaves[form.act]).__name__}, {heads} heads")
    rope = Rope(dim // heads, 1.0) if form.qkv == _QKV else None  # the model makes the angles
    attention = Attention(heads, heads, dim // heads, rope, qkv_bias=True, o_bias=True)
    up = [leaves[name] for name in form.up]
    feed_forward = Mlp(up[0].out_features, act, gated=len(up) == 2, bias=True)
    norm = _norm_of(leaves[form.norms[0]])
    biased = [name for name in form.norms if getattr(leaves[name], "bias", None) is not None]
    if len(biased) != 2 * norm.bias:
        raise Unsupported("layer norms without weights of their own")
    device = torch.device("cpu")
    context = LayerContext(bind("cpu"), device, torch.float32)
    block = BlockLayer(
        Block(attention, feed_forward, norm), dim, context, -1 if rope is None else 0, (0, 0)
    )
    mixer, ffn = _branches(block)
    for linear, names in (
        (mixer.qkv, form.qkv), (mixer.o, (form.out,)), (ffn.up, form.up),
        (ffn.down, (form.down,)),
    ):  # fmt: skip
        _fill(linear, [leaves[name] for name in names])
    for target, name in zip((block.norm1, block.norm2), form.norms, strict=True):
        for kind, param in target.own_params().items():
            param.fill(getattr(leaves[name], kind), None, device)
    for _, part in block.layers():
        part.finish()
    return block


def _branches(block: BlockLayer) -> tuple[AttentionLayer, MlpLayer]:
    assert isinstance(block.mixer, AttentionLayer) and isinstance(block.ffn, MlpLayer)
    return block.mixer, block.ffn


def _norm_of(norm: Any) -> Norm:
    if isinstance(norm, nn.LayerNorm):
        return Norm(norm.eps, "layer", bias=True)
    if not hasattr(norm, "variance_epsilon"):
        raise Unsupported(f"layers with {type(norm).__name__}")
    return Norm(norm.variance_epsilon)


def _fill(linear: Linear, sources: Sequence[Any]) -> None:
    """The rows of all sources; those without a bias have zeros."""
    weight = torch.cat([source.weight for source in sources])
    biases = [
        source.weight.new_zeros(source.out_features) if source.bias is None else source.bias
        for source in sources
    ]
    for name, value in ("weight", weight), ("bias", torch.cat(biases)):
        linear.own_params()[name].fill(value, None, value.device)


def _check(layer: nn.Module, forward: Callable[..., Tensor], block: BlockLayer) -> None:
    """Unsupported where the layer gives something else for two sequences of drawn rows."""
    draws = torch.Generator().manual_seed(0)
    (mixer, _), dim = _branches(block), block.norm1.shape[0]
    x_TD = torch.randn(8, dim, generator=draws)
    arguments: dict[str, Any] = {"hidden_states": x_TD.view(2, 4, dim), "attention_mask": None}
    if mixer.spec.rope is not None:
        angles_TR = torch.randn(8, mixer.spec.head_dim // 2, generator=draws).repeat(1, 2)
        arguments = {
            "hidden_states": x_TD,
            "cu_seqlens": torch.tensor([0, 3, 8]),
            "position_embeddings": (angles_TR.cos(), angles_TR.sin()),
        }
    try:
        want, got = layer(**arguments), forward(**arguments)
    except TypeError as error:  # parts that need what the layer passes on, such as places
        raise Unsupported(str(error)) from error
    is_close = isinstance(want, Tensor) and want.shape == got.shape
    if not is_close or not (want - got).abs().max() <= TOLERANCE * want.abs().max():
        raise Unsupported(f"what {type(layer).__name__} computes")
