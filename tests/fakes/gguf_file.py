"""Writes a GGUF file from a Hugging Face checkpoint, as llama.cpp's converters do."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

TYPE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "F64": 28, "BF16": 30}
# types that the tests cannot quantize to: random blocks, of so many numbers and bytes, whose scale
# lies in the last two bytes (LAST), in the first ones, or everywhere
RANDOM = {
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ1_M": (29, 256, 56), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}  # fmt: skip
LAST = ("TQ1_0", "TQ2_0")
TYPE |= {kind: number for kind, (number, _, _) in RANDOM.items()}
_CODES = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind = type(value[0])
        code = 8 if kind is str else _CODES[kind][0]
        items = b"".join(text(v) if kind is str else struct.pack(_CODES[kind][1], v) for v in value)
        return struct.pack("<IIQ", 9, code, len(value)) + items
    code, form = _CODES[type(value)]
    return struct.pack("<I", code) + struct.pack(form, value)


def quantized(value: torch.Tensor, kind: str) -> bytes:
    """The bytes of one tensor."""
    if kind == "F32":
        return value.float().numpy().tobytes()
    if kind == "F16":
        return value.half().numpy().tobytes()
    if kind == "BF16":
        return value.bfloat16().view(torch.int16).numpy().tobytes()
    if kind == "F64":
        return value.double().numpy().tobytes()
    if kind in RANDOM:
        return random_blocks(value.numel(), kind)
    if kind == "Q4_K":
        return q4_k(value.float().numpy().reshape(-1, 8, 32))
    blocks = value.float().numpy().reshape(-1, 32)
    if kind == "Q4_1":
        low = blocks.min(1, keepdims=True)
        d = (blocks.max(1, keepdims=True) - low) / 15
        q = np.round((blocks - low) / np.where(d == 0, 1, d)).astype(np.uint8)
        two = np.concatenate((d, low), 1).astype(np.float16).view(np.uint8)
        return np.concatenate((two, q[:, :16] | q[:, 16:] << 4), 1).tobytes()
    if kind == "Q8_0":
        d = np.abs(blocks).max(1, keepdims=True) / 127
        q = np.round(blocks / np.where(d == 0, 1, d)).astype(np.int8).view(np.uint8)
    else:
        best = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)][:, None]
        d = best / -8
        whole = np.clip(np.trunc(blocks / np.where(d == 0, 1, d) + 8.5), 0, 15).astype(np.uint8)
        q = whole[:, :16] | whole[:, 16:] << 4
    return np.concatenate((d.astype(np.float16).view(np.uint8), q), 1).tobytes()


def random_blocks(count: int, kind: str) -> bytes:
    """Blocks with scales that keep numbers of the size of weights."""
    _, block, size = RANDOM[kind]
    blocks = np.random.default_rng(count).integers(0, 256, (count // block, size), np.uint8)
    d = np.frombuffer(np.float16(0.05 if kind in LAST else 0.002).tobytes(), np.uint8)
    if kind in LAST:
        blocks[:, -2:] = d
    elif kind == "MXFP4":
        blocks[:, 0] = 122 + blocks[:, 0] % 4
    elif kind == "NVFP4":
        blocks[:, :4] = 8 + blocks[:, :4] % 16
    elif kind == "IQ1_M":  # a nibble of the scale in each of four words
        blocks[:, 49::2] &= 15
        blocks[:, 49::2] |= np.array([0x20, 0x10, 0x80, 0x10], np.uint8)
    else:
        blocks[:, :2] = d
    return blocks.tobytes()


def q4_k(groups: np.ndarray[Any, Any]) -> bytes:
    """Blocks of 8 groups with 6-bit scales and minima, relative to 16-bit maxima."""
    low = np.minimum(groups.min(2), 0)
    steps = np.stack(((groups.max(2) - low) / 15, -low))
    d = steps.max(2, keepdims=True).astype(np.float16) / 63
    whole = np.round(steps / np.where(d == 0, 1, d)).clip(0, 63).astype(np.uint8)
    used = (whole * d.astype(np.float16).astype(np.float32))[..., None]
    values = (groups + used[1]) / np.where(used[0] == 0, 1, used[0])
    q = np.round(values).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    first, last = whole[:, :, :4], whole[:, :, 4:]
    upper = first | (last >> 4) << 6
    packed = np.concatenate((*upper, last[0] & 15 | (last[1] & 15) << 4), 1)
    two = d[..., 0].T.astype(np.float16).copy().view(np.uint8)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(q), -1)
    return np.concatenate((two, packed, nibbles), 1).tobytes()


def write(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[torch.Tensor, str]]
) -> Path:
    """Write one file of version 3."""
    pairs = b"".join(text(key) + value_of(value) for key, value in metadata.items())
    records, data = b"", b""
    for name, (value, kind) in tensors.items():
        dims = list(value.shape)[::-1]
        records += text(name) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, TYPE[kind], len(data)
        )
        data += quantized(value, kind)
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + pairs + records
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


# suffix of a layer's tensor in Hugging Face -> in llama.cpp
PRE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
SANDWICH = PRE | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
BEHIND = PRE | {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "gemma2": SANDWICH, "gemma3": SANDWICH,
    "olmo2": BEHIND, "exaone4": BEHIND, "seed_oss": BEHIND,
    "glm4": PRE | {
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"
    },
    "gpt-oss": PRE | {
        "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
    },
    "starcoder2": PRE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}  # fmt: skip
IN_PAIRS = ("llama", "smollm3", "arcee", "granite")
EXPERT = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_parts(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[torch.Tensor, str]],
    num_parts: int,
) -> Path:
    """Write several files, the metadata in the first, as gguf-split does."""
    names, files = list(tensors), []
    for number in range(num_parts):
        place = {"split.no": number, "split.count": num_parts, "split.tensors.count": len(names)}
        part = {name: tensors[name] for name in names[number::num_parts]}
        file = path.with_name(f"{path.stem}-{number + 1:05d}-of-{num_parts:05d}.gguf")
        files.append(write(file, (metadata if number == 0 else {}) | place, part))
    return files[0]


def convert(
    folder: Path, path: Path, arch: str, kind: str, extra: dict[str, Any], num_parts: int = 0
) -> Path:
    """The checkpoint of a folder as one file of `kind` (vectors stay F32) or as several parts."""
    config = json.loads((folder / "config.json").read_text())
    names = NAMES.get(arch, PRE)
    tensors: dict[str, tuple[torch.Tensor, str]] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in named(load_file(folder / "model.safetensors"), arch):
        stem, _, ending = name.rpartition(".")
        if arch.startswith("gemma") and stem.endswith("norm"):
            value = value + 1
        if stem in ENDS:
            new = f"{ENDS[stem]}.{ending}"
        else:
            _, _, layer, rest = stem.split(".", 3)
            if ".experts." in rest:
                _, number, part = rest.rsplit(".", 2)
                experts.setdefault(f"blk.{layer}.ffn_{EXPERT[part]}_exps.{ending}", {})[
                    int(number)
                ] = value
                continue
            new = f"blk.{layer}.{names[rest]}.{ending}"
            if arch in IN_PAIRS and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                key = "num_attention_heads" if "q_" in rest else "num_key_value_heads"
                rows = value.reshape(config[key], 2, -1, *value.shape[1:])
                value = rows.swapaxes(1, 2).reshape(value.shape)
        if new.endswith("inp_shexp.weight"):
            value = value.squeeze()
        block = RANDOM[kind][1] if kind in RANDOM else 256 if kind.endswith("_K") else 32
        tensors[new] = value, kind if value.ndim > 1 and value.shape[-1] % block == 0 else "F32"
    for new, parts in experts.items():
        stacked = torch.stack([parts[i] for i in range(len(parts))])
        tensors[new] = stacked, kind if new.endswith("weight") else "F32"
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, config["head_dim"]), "F32"
    said = metadata(config, arch) | extra
    if num_parts:
        return write_parts(path, said, tensors, num_parts)
    return write(path, said, tensors)


def named(tensors: dict[str, torch.Tensor], arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, those of gpt-oss with modules and experts of their own."""
    for name, value in tensors.items():
        at, is_expert, part = name.partition(".experts.")
        if arch != "gpt-oss" or not (is_expert or name.endswith("sinks")):
            yield name, value
            continue
        if not is_expert:
            yield f"{name}.weight", value
            continue
        ending = "bias" if part.endswith("_bias") else "weight"
        for expert, one in enumerate(value):
            rows = one if ending == "bias" else one.T.contiguous()
            if part.startswith("down"):
                yield f"{at}.experts.{expert}.down_proj.{ending}", rows
            else:
                yield f"{at}.experts.{expert}.gate_proj.{ending}", rows[0::2]
                yield f"{at}.experts.{expert}.up_proj.{ending}", rows[1::2]


def llama3_factors(rope: dict[str, Any], dim: int) -> torch.Tensor:
    """The factors that divide Llama 3.1's frequencies."""
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    before, low, high = (
        rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    )  # fmt: skip
    waves = 2 * torch.pi / freqs
    smooth = (before / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    slow = torch.where(waves > before / low, torch.tensor(rope["factor"]), between)
    return torch.where(waves < before / high, torch.tensor(1.0), slow)


def num_layers(config: dict[str, Any]) -> int:
    """By any of its names."""
    listed = config.get("layers_block_type")
    return int(config.get("num_hidden_layers") or config.get("n_layer") or len(listed))


def metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """The metadata that converters write from config.json."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    own = {
        "context_length": config.get("max_position_embeddings", config.get("n_positions", 2048)),
        "embedding_length": config.get("hidden_size", config.get("n_embd")),
        "block_count": num_layers(config),
        "feed_forward_length": config.get("intermediate_size", 0),
        "attention.head_count": config.get("num_attention_heads", config.get("n_head", 0)),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("norm_epsilon"),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(
            (config.get("head_dim") or 0) * rope.get("partial_rotary_factor", 1)
        )
        or None,
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
        "attention.sliding_window": config.get("sliding_window"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if arch == "gpt-oss":
        own |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if arch == "exaone4":
        kinds = config["layer_types"]
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    named = {f"{arch}.{key}": value for key, value in own.items() if value is not None}
    ids = {f"tokenizer.ggml.{x}_token_id": config.get(f"{x}_token_id") for x in ("bos", "eos")}
    return {"general.architecture": arch} | named | {k: v for k, v in ids.items() if v is not None}
