"""GGUF files give the model of their checkpoint, and never take more memory than their bytes."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import gguf_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

import radixlm
from radixlm.arch.gguf import read_header
from radixlm.base.errors import CheckpointError
from radixlm.engine.gguf import unpacked
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.layers.linear import Linear
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import Model
from radixlm.quant.checkpoint import StoredQuant, checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.text.tokenizer import load_tokenizer
from radixlm.weights.gguf_file import GgufSource

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "ArceeForCausalLM": "arcee",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4ForCausalLM": "glm4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Starcoder2ForCausalLM": "starcoder2",
    "GptOssForCausalLM": "gpt-oss",
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 16, "head_dim": 16},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 16, "head_dim": 16},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "Starcoder2ForCausalLM": {"sliding_window": None},  # llama.cpp has no sliding window for it
}
IDS = torch.randint(3, 380, (21,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _logits(folder: Path) -> torch.Tensor:
    return PagedRunner(load_model(folder)).prefill({0: IDS}, num_chunks=2)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_gives_the_logits_of_its_checkpoint(architecture: str, tmp_path: Path) -> None:
    folder = cached_tiny(architecture, **OVERRIDES.get(architecture, {}))
    file = gguf_file.convert(folder, tmp_path / "m.gguf", ARCHITECTURES[architecture], "F32", {})
    torch.testing.assert_close(_logits(unpacked(file)), _logits(folder), rtol=1e-5, atol=1e-5)


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 8, "beta_slow": 2}
_WINDOWS = [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("architecture", "settings", "extra"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}),
        ("SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}, {}),
        ("SeedOssForCausalLM", {"attention_bias": False, "attention_out_bias": False}, {}),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, {}),
        ("Starcoder2ForCausalLM", {"use_bias": False, "sliding_window": None}, {}),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, {}),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                 "partial_rotary_factor": 0.5}},
            {"phi3.rope.dimension_count": 8},
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {**_YARN, "original_max_position_embeddings": 16,
                                 "attention_factor": 1.2}},
            {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
             "qwen3.rope.scaling.original_context_length": 16,
             "qwen3.rope.scaling.yarn_attn_factor": 1.2,
             "qwen3.rope.scaling.yarn_beta_fast": 8.0, "qwen3.rope.scaling.yarn_beta_slow": 2.0},
        ),
        (
            "Olmo3ForCausalLM",
            {"layer_types": _WINDOWS, "sliding_window": 7,
             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            {"olmo2.attention.sliding_window_pattern": [True, True, False, True]},
        ),
    ],
)  # fmt: skip
def test_settings_that_the_file_tells(
    architecture: str, settings: dict[str, Any], extra: dict[str, Any], tmp_path: Path
) -> None:
    """Which layers have biases, what is rotated, windows."""
    folder = cached_tiny(architecture, **settings)
    kind = ARCHITECTURES.get(architecture, "olmo2")
    file = gguf_file.convert(folder, tmp_path / "m.gguf", kind, "F32", extra)
    torch.testing.assert_close(_logits(unpacked(file)), _logits(folder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "near"),
    [("F16", 2e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.1), ("Q4_1", 0.1)],
)
def test_quantized_weights_are_near(kind: str, near: float, tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", kind, {})
    source = GgufSource(file)
    whole = GgufSource(gguf_file.convert(folder, tmp_path / "w.gguf", "qwen3", "F32", {}))
    assert set(source.sizes()) == set(whole.sizes())
    for name in source.sizes():
        ours, theirs = source.read(name).float(), whole.read(name)
        assert float((ours - theirs).abs().max()) <= near * float(theirs.abs().max()), name
        source.release(name)


WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_four_bits_stay_as_they_are(architecture: str, kind: str, tmp_path: Path) -> None:
    """Values, scales and offsets are those of the file, with or without permuted and fused rows."""
    folder = cached_tiny(architecture, **WIDE)
    file = gguf_file.convert(
        folder, tmp_path / "m.gguf", ARCHITECTURES[architecture], kind, {"general.x": 1}
    )
    source = GgufSource(file)
    names = [name for name in source.sizes() if name.endswith("proj.weight")]
    assert len(names) == 7 * 3 and all(source.is_quantized(name) for name in names)
    for name in names:
        assert torch.equal(source.read_quantized(name).dequantize(), source.read(name)), name


def _linears(folder: Path, name: str, **build: Any) -> list[PackedLinear]:
    kernels = bind("cpu", {"all": name} if name else None)
    model = load_model(folder, kernels, **build)
    found = [layer for path, layer in model.layers() if path.startswith("blocks.1.")]
    return [layer.packed for layer in found if isinstance(layer, Linear)]


@pytest.mark.parametrize("name", ["", "reference"])
def test_fused_layers_keep_a_common_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached_tiny("LlamaForCausalLM", **WIDE)
    folder = unpacked(gguf_file.convert(folder, tmp_path / "m.gguf", "llama", "Q4_K", {}))
    quant = checkpoint_quant(folder)
    assert quant is not None and quant.method == "gguf"
    wide = _linears(folder, "reference", weight_dtype=torch.float32)
    kept = _linears(folder, name, scheme=make_scheme(None, "", quant))
    assert len(wide) == len(kept) == 4
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    for ours, theirs in zip(kept, wide, strict=True):
        near = {"rtol": 0.0, "atol": 0.005}  # bfloat16, from values of about 0.5
        torch.testing.assert_close(ours.unpack().float(), theirs.unpack(), **near)
        assert ours.unpack().dtype == torch.bfloat16
        got, wanted = ours.run(x), theirs.run(x)
        assert float((got - wanted).norm()) < 0.02 * float(wanted.norm())  # inputs in 8 bits
    asked = _linears(folder, name, scheme=make_scheme(None, "", quant), weight_dtype=torch.float32)
    assert all(torch.equal(a.unpack(), b.unpack()) for a, b in zip(asked, wide, strict=True))
    is_quantized = GgufSource.is_quantized
    monkeypatch.setattr(
        GgufSource,
        "is_quantized",
        lambda self, name: "v_proj" not in name and is_quantized(self, name),
    )
    mixed = _linears(folder, name, scheme=make_scheme("gguf", "", quant))
    is_kept = [torch.equal(a.run(x), b.run(x)) for a, b in zip(mixed, kept, strict=True)]
    assert is_kept == [False, True, True, True]


@pytest.mark.parametrize("name", ["", "reference"])
def test_experts_keep_their_formats(name: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64}
    folder = cached_tiny("Qwen3MoeForCausalLM", **sizes)
    folder = unpacked(gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3moe", "Q4_1", {}))
    kernels = bind("cpu", {"all": name} if name else None)
    kept = load_model(folder, kernels, scheme=make_scheme(None, "", checkpoint_quant(folder)))
    wide = load_model(folder, weight_dtype=torch.float32)
    experts = zip(_experts(kept), _experts(wide), strict=True)
    x, weights = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)), torch.ones(3, 1)
    for ours, theirs in experts:
        if not name and cpu.available:
            assert {one.fmt for side in ours._weights for one in side} == {"w4a8-32"}
        for expert in range(ours.num_experts):
            ids = torch.full((3, 1), expert)
            wanted = theirs.run(x, weights, ids)
            error = (ours.run(x, weights, ids) - wanted).norm()
            assert float(error) < 0.03 * float(wanted.norm())  # inputs in 8 bits


def _experts(model: Model) -> list[Any]:
    return [layer.experts for _, layer in model.layers() if isinstance(layer, MoeLayer)]


def test_a_nan_scale_is_named(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", **WIDE)
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "Q4_0", {})
    at = read_header(file).tensors["blk.2.ffn_up.weight"].start + 18
    raw = bytearray(file.read_bytes())
    raw[at : at + 2] = b"\x00\x7e"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blocks\.2.*NaN.*m\.gguf: blk\.2\.ffn_up\.weight\)"):
        load_model(unpacked(file), scheme=make_scheme("gguf", "", StoredQuant("gguf")))


@pytest.mark.parametrize("rows_and_inputs", [(128, 64), (128, 512), (0, 256), (127, 256)])
def test_a_wrong_shape_in_four_bits_is_named(
    rows_and_inputs: tuple[int, int], tmp_path: Path
) -> None:
    folder = cached_tiny("LlamaForCausalLM", **WIDE)
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "llama", "Q4_0", {})
    raw, name = bytearray(file.read_bytes()), b"blk.1.attn_k.weight"
    at = raw.index(name) + len(name) + 4
    raw[at : at + 16] = struct.pack("<QQ", *rows_and_inputs[::-1])
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mixer\.qkv.*m\.gguf.*blk\.1\.attn_k.*"):
        load_model(unpacked(file), scheme=make_scheme("gguf", "", StoredQuant("gguf")))


def test_unsupported_types_are_refused_by_name(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "F32", {})
    raw = bytearray(file.read_bytes())
    at = raw.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight")
    raw[at + 4 : at + 12] = (256).to_bytes(8, "little")  # a row of one block
    raw[at + 20] = 36
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"ffn_down\.weight is of type 36; read are: F32, "):
        GgufSource(file)


def test_inconsistent_headers_are_refused_at_once(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "F32", tokens)
    whole, rng = file.read_bytes(), random.Random(0)
    header = whole.index(b"token_embd.weight") + 60
    for _ in range(300):
        raw = bytearray(whole)
        if rng.random() < 0.3:
            raw = raw[: rng.randrange(len(raw))]
        else:
            for _ in range(rng.choice([1, 8])):
                raw[rng.randrange(header)] = rng.choice([0, 1, 127, 255])
        file.write_bytes(raw)
        try:
            GgufSource(file)
            unpacked(file)
        except CheckpointError as error:
            assert "m.gguf" in str(error)


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        (
            "exaone4",
            "block_count",
            2**31 - 1,
            r"exaone4\.block_count = 2147483647, with \d+ tensors",
        ),
        ("qwen3", "nextn_predict_layers", "abc", r"nextn_predict_layers = 'abc' must be"),
        ("stablelm", "attention.head_count", 2**31 - 1, r"attention\.key_length = 0 must be"),
    ],
)
def test_values_that_do_not_fit_are_refused_at_once(
    arch: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    folder = cached_tiny("Qwen3ForCausalLM")
    gguf_file.convert(folder, file, "qwen3", "F32", {})
    header = read_header(file)
    said = {name.replace("qwen3.", f"{arch}."): one for name, one in header.metadata.items()}
    said |= {"general.architecture": arch, f"{arch}.{key}": value}
    said.pop(f"{arch}.attention.key_length", None)
    rows = {name: (torch.ones(tensor.shape), "F32") for name, tensor in header.tensors.items()}
    gguf_file.write(file, said, rows)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{message}"):
        unpacked(file)
        GgufSource(file)


def test_the_tokenizer_of_the_file_equals_the_checkpoints(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    model = json.loads((folder / "tokenizer.json").read_text())
    vocab = model["model"]["vocab"] | {t["content"]: t["id"] for t in model["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {t["content"] for t in model["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    extra = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }  # fmt: skip
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "F32", extra)
    ours, theirs = load_tokenizer(unpacked(file)), load_tokenizer(folder)
    for text in ("The quick brown fox, 123 times\n\n", "<|im_start|>user\nhé<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_sentencepiece_is_rebuilt_from_its_scores(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "a", "b", "ab", "▁ab", "abab"]
    scores = [0.0] * (len(pieces) + 3) + [-1.0, -2.0, -3.0]
    extra = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    folder = cached_tiny("LlamaForCausalLM")
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "llama", "F32", extra)
    tokenizer = load_tokenizer(unpacked(file))
    first = len(pieces)
    assert tokenizer.encode("ab abc") == [1, first + 4, first + 4, 3 + ord("c")]
    assert tokenizer.decode([first + 4, first + 4, 3 + ord("c")]) == "ab abc"


def test_an_unsupported_tokenizer_names_the_flag(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    extra = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "F32", extra)
    with pytest.raises(CheckpointError, match="--tokenizer-path"):
        load_tokenizer(unpacked(file))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    file = gguf_file.write(tmp_path / "m.gguf", {"general.architecture": "nobody"}, {})
    assert read_header(file).architecture == "nobody"
    with pytest.raises(CheckpointError, match="nobody"):
        unpacked(file)


def test_a_served_file_gives_the_tokens_of_its_checkpoint(tmp_path: Path) -> None:
    folder, said = cached_tiny("Qwen3ForCausalLM"), []
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", "F32", {})
    greedy = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    for path in (folder, file):
        with radixlm.Engine(
            model_path=str(path), cpu_threads=1, log_level="error", skip_tokenizer_init=True,
            max_total_tokens=2048,
        ) as engine:  # fmt: skip
            said.append(engine.generate(input_ids=IDS, sampling_params=greedy)["output_ids"])
    assert said[0] == said[1]
