"""Integer checkpoints: the model computes with exactly their numbers, and layers stay quantized if
the kernels support their format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.integer_checkpoint import FILE, KEPT, Layout, write_integers
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny, reference_model
from tests.multimodal import tiny

import radixlm
from radixlm.base.errors import CheckpointError
from radixlm.kernels import cpu
from radixlm.kernels.cpu.linear import PackedLinear
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.linear import GatherLinear
from radixlm.layers.linear import Linear
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel
from radixlm.models.encoders.transformers_encoder import _load as load_encoders
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
MOE = WIDE | {"moe_intermediate_size": 128}
IDS = {0: list(range(5, 25)), 1: [9, 8, 7]}
LAYOUTS = {
    "awq-32": Layout("awq", group=32),
    "awq-64": Layout("awq", group=64),
    "awq-128": Layout("awq", group=128),
    "gptq-4": Layout("gptq", group=128),
    "gptq-4-sym": Layout("gptq", group=64, sym=True),
    "gptq-4-row": Layout("gptq", group=0, sym=True),
    "gptq-4-order": Layout("gptq", group=64, order=True),
    "gptq-4-order-sym-v2": Layout("gptq", group=32, order=True, sym=True, is_v2=True),
    "gptq-8-sym": Layout("gptq", bits=8, group=0, sym=True),
    "gptq-8": Layout("gptq", bits=8, group=128),
    "gptq-8-order": Layout("gptq", bits=8, group=64, order=True),
    "gptq-2": Layout("gptq", bits=2, group=64),
    "gptq-3-order": Layout("gptq", bits=3, group=32, order=True),
    "gptq-5-sym": Layout("gptq", bits=5, group=64, sym=True),
    "packed-3": Layout("packed", bits=3, group=128),
    "packed-6": Layout("packed", bits=6, group=64, sym=True),
    "packed-7-row": Layout("packed", bits=7, group=0, sym=True),
    "packed-4": Layout("packed", group=128, sym=True),
    "packed-4-zeros": Layout("packed", group=32),
    "packed-4-row": Layout("packed", group=0),
    "packed-4-order": Layout("packed", group=64, sym=True, order=True),
    "packed-8": Layout("packed", bits=8, group=0, sym=True),
    "packed-8-groups": Layout("packed", bits=8, group=64),
    "int8": Layout("int8", bits=8, group=0, sym=True),
    "blocks": Layout("blocks", bits=8, group=128),
}
WHOLE_ROWS = {
    "gptq-8-sym": "int8wo",
    "packed-7-row": "int8wo",
    "packed-8": "int8wo",
    "int8": "w8a8",
}


def load(folder: Path, backend: str = "native", asked: str | None = None, **more: Any) -> Model:
    kernels = bind("cpu", {"all": "reference"} if backend == "reference" else None)
    scheme = make_scheme(asked, "", checkpoint_quant(folder))
    return load_model(folder, kernels, scheme=scheme, **more)


def linears(model: Model) -> dict[str, Linear]:
    return {
        path: layer
        for path, layer in model.layers()
        if isinstance(layer, Linear) and path.startswith("blocks.") and "router" not in path
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_uses_the_stored_numbers(name: str, tmp_path: Path) -> None:
    arch = "LlamaForCausalLM" if "row" in name else "Qwen3ForCausalLM"
    narrow, wide = write_integers(cached_tiny(arch, **WIDE), tmp_path, LAYOUTS[name])
    floats = load_model(wide)
    want = PagedRunner(floats).prefill(IDS)
    plain = PagedRunner(load_model(narrow)).prefill(IDS)
    for sequence in IDS:
        torch.testing.assert_close(plain[sequence], want[sequence], rtol=1e-4, atol=1e-4)
    kept, coarse = load(narrow), load(narrow, "reference")
    for path, layer in linears(kept).items():
        weight = linears(floats)[path].packed.unpack()
        # rounded to bfloat16, possibly twice
        near = {"rtol": 0.0, "atol": 2.0**-7 * float(weight.abs().max())}
        torch.testing.assert_close(layer.packed.unpack().float(), weight, **near)
        torch.testing.assert_close(linears(coarse)[path].packed.unpack().float(), weight, **near)
    spread = float(want[0].std())
    native = PagedRunner(kept).prefill(IDS)
    reference = PagedRunner(coarse).prefill(IDS)
    for sequence in IDS:
        error = (native[sequence] - want[sequence]).pow(2).mean().sqrt()
        assert float(error) < 0.05 * spread  # activations in 8 bits
        # Values may round to the other side if their last bits differ.
        other = (native[sequence] - reference[sequence]).pow(2).mean().sqrt()
        assert float(other) < 0.02 * spread


@pytest.mark.parametrize("name", ["gptq-4-order", "gptq-8-sym"])
def test_matrices_of_gpt2_are_stored_as_linear_layers(name: str, tmp_path: Path) -> None:
    """Quantizing has transposed them; where they stay floats they are [in, out]."""
    source = copy_tiny(cached_tiny("GPT2LMHeadModel"), tmp_path / "source")
    tensors = load_file(source / FILE)
    convs = {n for n in tensors if n.endswith(("attn.weight", "proj.weight", "fc.weight"))}
    save_file({n: t.T.contiguous() if n in convs else t for n, t in tensors.items()}, source / FILE)
    kept = ("wte", "wpe", "h.1.mlp")
    narrow, wide = write_integers(source, tmp_path, LAYOUTS[name], kept)
    for folder in (narrow, wide):
        small = load_file(folder / FILE)
        turned = {n: t.T.contiguous() if n in convs else t for n, t in small.items()}
        save_file(turned, folder / FILE)
    want = PagedRunner(load_model(wide)).prefill(IDS)
    plain, near = PagedRunner(load_model(narrow)).prefill(IDS), PagedRunner(load(narrow))
    for sequence, got in near.prefill(IDS).items():
        torch.testing.assert_close(plain[sequence], want[sequence], rtol=1e-4, atol=1e-4)
        assert float((got - want[sequence]).norm()) < 0.1 * float(want[sequence].norm())


@pytest.mark.parametrize("bits", [3, 5, 7, 8])
def test_rows_of_one_word_have_the_bits_of_the_config(bits: int, tmp_path: Path) -> None:
    source = cached_tiny("LlamaForCausalLM", intermediate_size=4, num_hidden_layers=2)
    layout = Layout("packed", bits=bits, group=0, sym=True)
    narrow, wide = write_integers(source, tmp_path, layout)
    want = PagedRunner(load_model(wide)).prefill(IDS)
    got = PagedRunner(load_model(narrow)).prefill(IDS)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not cpu.available, reason="the C++ kernels are not built")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_stay_quantized(name: str, tmp_path: Path) -> None:
    """In formats of the kernels, with no more bytes than the checkpoint with float32 scales."""
    layout = LAYOUTS[name]
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    narrow, _ = write_integers(source, tmp_path, layout)
    for layer in linears(load(narrow)).values():
        packed: Any = layer.packed
        if name in WHOLE_ROWS:
            assert packed.packed.fmt == WHOLE_ROWS[name]
            continue
        assert isinstance(packed, GatherLinear) == (layout.order or layout.bits > 4)
        native = (packed.inner if isinstance(packed, GatherLinear) else packed).packed
        assert isinstance(native, PackedLinear)
        group = min(layout.group or 128, 128)
        assert native.fmt == f"w4a8-{group}"
        count = layer.in_features * layer.out_features
        num_scales = (1 if layout.sym else 2) * count // group
        if layout.bits <= 4:
            assert native.num_bytes == count // 2 + 4 * num_scales
        else:
            assert native.num_bytes <= count + 16 * count // group


@pytest.mark.skipif(not cpu.available, reason="the C++ kernels are not built")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_program_gives_the_numbers_of_the_layers(name: str, tmp_path: Path) -> None:
    """The same bits for any order or format of the integers, and the same greedy tokens."""
    narrow, _ = write_integers(cached_tiny("Qwen3ForCausalLM", **WIDE), tmp_path, LAYOUTS[name])
    model = load(narrow)
    assert isinstance(model, DecoderModel)
    replies = []
    for model.use_program in (False, True):
        runner = PagedRunner(model, "cpu", 16)
        logits = [runner.prefill(IDS, 2)]
        for _ in range(4):
            chosen = {s: [int(rows[-1].argmax())] for s, rows in logits[-1].items()}
            logits.append(runner.step(chosen))
        assert (model.program is not None) == model.use_program
        replies.append(logits)
    for layers, program in zip(*replies, strict=True):
        assert all(torch.equal(layers[s], program[s]) for s in IDS)


@pytest.mark.parametrize("name", ["awq-32", "gptq-4-sym", "gptq-8-sym", "gptq-4-order", "int8"])
def test_experts(name: str, tmp_path: Path) -> None:
    """Quantized if whole experts can be; act-order, which experts do not support, is
    dequantized."""
    narrow, wide = write_integers(
        cached_tiny("Qwen3MoeForCausalLM", **MOE), tmp_path, LAYOUTS[name]
    )
    want = PagedRunner(load_model(wide)).prefill(IDS)
    kept = load(narrow)
    got, spread = PagedRunner(kept).prefill(IDS), float(want[0].std())
    for sequence in IDS:
        error = (got[sequence] - want[sequence]).pow(2).mean(1).sqrt().median()
        assert float(error) < 0.1 * spread
    if not cpu.available:
        return
    fmt = {"gptq-8-sym": "int8wo", "int8": "w8a8", "gptq-4-order": "fp32"}.get(name)
    for _, layer in kept.layers():
        if isinstance(layer, MoeLayer):
            experts: Any = layer.experts
            ups, downs = experts._weights
            formats = {one.fmt for one in (*ups, *downs)}
            assert formats == {fmt or f"w4a8-{LAYOUTS[name].group}"}


def test_stacked_experts_may_stay_floats(tmp_path: Path) -> None:
    source = cached_tiny("GptOssForCausalLM", head_dim=32)
    narrow, wide = write_integers(source, tmp_path, LAYOUTS["gptq-4-sym"], (*KEPT, "mlp."))
    want = PagedRunner(load_model(wide)).prefill(IDS)[0]
    error = (PagedRunner(load(narrow)).prefill(IDS)[0] - want).pow(2).mean(1).sqrt().median()
    assert float(error) < 0.1 * float(want.std())


def test_a_layer_with_one_part_in_floats_is_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    kept = (*KEPT, "v_proj", "layers.1.mlp")
    narrow, wide = write_integers(source, tmp_path, LAYOUTS["awq-64"], kept)
    with caplog.at_level("INFO"):
        model = load(narrow)
    want = PagedRunner(load_model(wide)).prefill(IDS)[0]
    error = (PagedRunner(model).prefill(IDS)[0] - want).pow(2).mean().sqrt()
    assert float(error) < 0.05 * float(want.std())
    said = "\n".join(caplog.messages)
    assert "4 stay quantized" in said  # two o, one up, one down
    assert re.search(r"iB of quantized weights were dequantized to .*iB of floats", said)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("Qwen3ForCausalLM", "awq-128"),
        ("LlamaForCausalLM", "gptq-4-order"),
        ("Qwen3MoeForCausalLM", "gptq-4-sym"),
        ("Qwen3ForCausalLM", "int8"),
    ],
)
def test_engine_tokens_are_near_those_of_transformers(arch: str, name: str, tmp_path: Path) -> None:
    """Each token is within the error of 8-bit activations of the float model's best token, and its
    log-probability is near."""
    narrow, wide = write_integers(cached_tiny(arch, **MOE), tmp_path, LAYOUTS[name])
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    with radixlm.Engine(
        model_path=str(narrow), cpu_threads=1, log_level="error", skip_tokenizer_init=True,
        max_total_tokens=2048,
    ) as engine:  # fmt: skip
        reply = engine.generate(input_ids=IDS[0], sampling_params=greedy, return_logprob=True)
    chosen = reply["output_ids"]
    ours = torch.tensor([float(one[0]) for one in reply["meta_info"]["output_token_logprobs"]])
    with torch.inference_mode():
        logits = reference_model(wide)(torch.tensor([IDS[0] + chosen])).logits[0]
    theirs = logits[len(IDS[0]) - 1 : -1].log_softmax(-1)
    picked = theirs.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert float((theirs.amax(-1) - picked).max()) < 0.2
    assert float((ours - picked).abs().median()) < 0.1


@pytest.mark.filterwarnings("ignore")  # Hugging Face encoders of tiny configs
def test_float_encoders_with_integer_language_models(tmp_path: Path) -> None:
    """Encoders stay floats, and no package for the integers of the language model is needed."""
    tiny.save(tiny.qwen2_5_vl(), tmp_path / "source")
    kept = (*KEPT, "visual")
    narrow, wide = write_integers(tmp_path / "source", tmp_path, LAYOUTS["awq-32"], kept)
    found, want = (
        dict(load_encoders(f, torch.float32)[0].named_parameters()) for f in (narrow, wide)
    )
    assert found.keys() == want.keys() and len(found) > 20
    assert all(torch.equal(value, want[name]) for name, value in found.items())


# damage to the tensors of one weight, by the suffix of their names -> the message
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], object]


def _put(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda tensors: tensors.update({f"{Q}.{part}": make(tensors[f"{Q}.{part}"])})


def _drop(part: str) -> Edit:
    return lambda tensors: tensors.pop(f"{Q}.{part}")


def _half(t: torch.Tensor) -> torch.Tensor:
    return t[: t.shape[0] // 2].clone()


DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "no scales": ("awq-32", _drop("scales"), r"q_proj\.scales is missing"),
    "no zeros": ("gptq-4", _drop("qzeros"), r"q_proj\.qzeros is missing"),
    "no words": ("awq-32", _drop("qweight"), r"q_proj\.qweight is missing"),
    "no packed": ("packed-4", _drop("weight_packed"), r"q_proj\.weight_packed is missing"),
    "no shape": ("packed-4", _drop("weight_shape"), r"q_proj\.weight_shape is missing"),
    "no int8 scale": ("int8", _drop("weight_scale"), r"q_proj\.weight\b"),
    "half the scales": ("awq-32", _put("scales", _half), r"scales"),
    "half the words": ("gptq-4", _put("qweight", _half), r"qweight|scales|g_idx"),
    "half the zeros": ("gptq-4", _put("qzeros", _half), r"q_proj\.qzeros"),
    "other words": ("awq-32", _put("qweight", lambda t: t.to(torch.int64)), r"qweight.*int64"),
    "float words": ("gptq-4", _put("qweight", lambda t: t.float()), r"qweight.*float32"),
    "scales in integers": ("awq-32", _put("scales", lambda t: t.to(torch.int32)), r"scales.*int32"),
    "no rows": ("awq-32", _put("qweight", lambda t: t[:0].clone()), r"q_proj\.scales"),
    "no numbers": ("gptq-4", _put("qzeros", lambda t: t[:0].clone()), r"q_proj\.qzeros"),
    "no columns": ("packed-4", _put("weight_packed", lambda t: t[:, :0].clone()), r"weight_packed"),
    "nothing": ("int8", _put("weight", lambda t: t[:0].clone()), r"q_proj\.weight_scale"),
    "an axis more": ("awq-32", _put("scales", lambda t: t[None].clone()), r"q_proj\.scales"),
    "an axis less": ("packed-4", _put("weight_packed", lambda t: t[0].clone()), r"weight_packed"),
    "a word more": ("awq-32", _put("qweight", lambda t: torch.cat((t, t[:, :1]), 1)), r"scales"),
    "an order too far": ("gptq-4-order", _put("g_idx", lambda t: t + 1), r"q_proj\.g_idx"),
    "a short order": ("gptq-4-order", _put("g_idx", lambda t: t[1:].clone()), r"q_proj\.g_idx"),
    "other bits": ("gptq-4", _put("qzeros", lambda t: t.repeat(1, 2)), r"q_proj\.qzeros"),
    "another shape": ("packed-4", _put("weight_shape", lambda t: t * 2), r"q_proj\.weight_shape"),
    "NaN": ("awq-32", _put("scales", lambda t: t * torch.nan), r"holds NaN"),
    "infinity": ("int8", _put("weight_scale", lambda t: t + torch.inf), r"holds (infinity|NaN)"),
    "int16": ("int8", _put("weight", lambda t: t.to(torch.int16)), r"q_proj\.weight.*int16"),
    "a number": ("int8", _put("weight_scale", lambda t: t[:3].clone()), r"weight_scale"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    name, edit, said = DAMAGE[kind]
    narrow, _ = write_integers(cached_tiny("Qwen3ForCausalLM", **WIDE), tmp_path, LAYOUTS[name])
    tensors = load_file(narrow / FILE)
    edit(tensors)
    save_file(tensors, narrow / FILE)
    for backend in ("native", "plain"):
        with pytest.raises(CheckpointError) as caught:
            load(narrow) if backend == "native" else load_model(narrow)
        message = str(caught.value)
        assert re.search(said, message), message
        assert "\n" not in message and f"{FILE}: {Q}." in message


def test_a_missing_layer(tmp_path: Path) -> None:
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    narrow, _ = write_integers(source, tmp_path, LAYOUTS["awq-32"])
    tensors = {n: t for n, t in load_file(narrow / FILE).items() if not n.startswith(Q)}
    save_file(tensors, narrow / FILE)
    with pytest.raises(CheckpointError, match=rf"missing from {FILE}: {Q}\.weight"):
        load(narrow)


def test_an_extra_layer(tmp_path: Path) -> None:
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    narrow, _ = write_integers(source, tmp_path, LAYOUTS["awq-32"])
    tensors = load_file(narrow / FILE)
    tensors["model.layers.0.mystery.qweight"] = torch.zeros(2, 2, dtype=torch.int32)
    save_file(tensors, narrow / FILE)
    with pytest.raises(CheckpointError, match=rf"{FILE}: model\.layers\.0\.mystery\.qweight"):
        load(narrow)


def test_zero_biases_are_ignored(tmp_path: Path) -> None:
    """Older tools wrote zeros for layers without a bias; other values are refused."""
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    narrow, _ = write_integers(source, tmp_path, LAYOUTS["gptq-4"])
    tensors = load_file(narrow / FILE)
    save_file(tensors | {f"{Q}.bias": torch.zeros(256)}, narrow / FILE)
    load(narrow)
    save_file(tensors | {f"{Q}.bias": torch.ones(256)}, narrow / FILE)
    with pytest.raises(CheckpointError, match=r"not part of the model: .*q_proj\.bias"):
        load(narrow)


def test_integers_without_a_quantization_config(tmp_path: Path) -> None:
    source = cached_tiny("Qwen3ForCausalLM", **WIDE)
    narrow, _ = write_integers(source, tmp_path, LAYOUTS["awq-32"])
    config = json.loads((narrow / "config.json").read_text())
    stated = config.pop("quantization_config")
    (narrow / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: no quantization.*{FILE}: model"):
        load(narrow)
    old = {"w_bit": stated["bits"], "q_group_size": stated["group_size"], "version": "GEMM"}
    (narrow / "quant_config.json").write_text(json.dumps(old))
    load(narrow)


def test_dtype_does_not_dequantize(tmp_path: Path) -> None:
    narrow, _ = write_integers(
        cached_tiny("Qwen3ForCausalLM", **WIDE), tmp_path, LAYOUTS["awq-128"]
    )
    asked = linears(load(narrow, weight_dtype=torch.float16))
    kept = linears(load(narrow))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    for path, layer in asked.items():
        assert torch.equal(layer.run(x), kept[path].run(x))


def test_files_with_an_index(tmp_path: Path) -> None:
    """Its names are those of the parts."""
    source = copy_tiny(cached_tiny("Qwen3ForCausalLM", **WIDE), tmp_path / "source")
    narrow, _ = write_integers(source, tmp_path, LAYOUTS["gptq-4"])
    tensors, homes = load_file(narrow / FILE), {}
    (narrow / FILE).unlink()
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, narrow / file)
        homes |= dict.fromkeys(part, file)
    index = narrow / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    load(narrow)
    index.write_text(json.dumps({"weight_map": homes | {f"{Q}.extra": homes[f"{Q}.scales"]}}))
    with pytest.raises(CheckpointError, match=r"missing from .*: .*q_proj\.extra"):
        load(narrow)
