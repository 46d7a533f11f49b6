"""Scales of a KV cache in 8 bit floats: from checkpoints and files, and what the cache holds."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

import radixlm
from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.kv import to_kv
from radixlm.models.build import Model, build_model
from radixlm.models.decoder import DecoderModel
from radixlm.weights.folder import open_folder
from radixlm.weights.kv_scales import checkpoint_scales, file_scales, with_kv_scales
from radixlm.weights.load import load_weights

IDS = {0: list(range(5, 45)), 1: [9, 8, 7]}
SCALES = {0: (0.37, 12.5), 1: (2.6, 0.11), 2: (1.0, 3.0)}
CPU = torch.device("cpu")


def _model(folder: Path, scales: dict[int, tuple[float, float]], native: bool) -> Model:
    kernels = bind("cpu", None if native else {"all": "reference"})
    decoder, count = with_kv_scales(describe(folder), scales)
    assert count == len(scales)
    model = build_model(decoder, CPU, torch.float32, kernels)
    load_weights(model, folder, progress=False)
    return model


def _stored(runner: PagedRunner, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of sequence 0 as the cache holds them."""
    pool = runner.backend.pools[0]
    assert pool is not None
    k, v = pool.read(layer, runner.pages[0][0])
    assert v is not None
    return k[: len(IDS[0])], v[: len(IDS[0])]


BACKENDS = [
    "torch_native",
    pytest.param("cpu", marks=pytest.mark.skipif(not cpu.available, reason=cpu.reason)),
    pytest.param("triton", marks=pytest.mark.skipif(not find_spec("triton"), reason="no triton")),
]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_holds_scaled_numbers(backend: str, dtype: torch.dtype) -> None:
    """Bit for bit those of torch's division, rounding and limits; results without rounding are
    those of a model without scales."""
    folder, native = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=3), backend == "cpu"
    page = 16 if native else 4
    plain = PagedRunner(_model(folder, {}, native), backend, page)
    want = plain.prefill(IDS)
    model = _model(folder, SCALES, native)
    exact = PagedRunner(model, backend, page).prefill(IDS)
    narrow = PagedRunner(model, backend, page, cache_dtype=dtype)
    got = narrow.prefill(IDS)
    for sequence in IDS:
        torch.testing.assert_close(exact[sequence], want[sequence], rtol=1e-4, atol=1e-4)
        error = (got[sequence] - want[sequence]).norm() / want[sequence].norm()
        assert float(error) < (0.07 if dtype == torch.float8_e4m3fn else 0.15)
    wide, held = _stored(plain, 0), _stored(narrow, 0)
    for numbers, stored, scale in zip(wide, held, SCALES[0], strict=True):
        assert torch.equal(stored.float(), to_kv(numbers * (1 / scale), dtype).float())


@pytest.mark.skipif(not cpu.available, reason="the C++ kernels are not built")
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "GptOssForCausalLM", "Gemma2ForCausalLM"])
def test_a_program_gives_the_bits_of_the_layers(arch: str) -> None:
    """With sinks, windows and softcap too."""
    model = _model(cached_tiny(arch, num_hidden_layers=3), SCALES, native=True)
    assert isinstance(model, DecoderModel)
    replies = []
    for model.use_program in (False, True):
        runner = PagedRunner(model, "cpu", 16, cache_dtype=torch.float8_e4m3fn)
        replies.append(runner.prefill(IDS, 2))
        assert (model.program is not None) == model.use_program
    for sequence in IDS:  # experts add up in another order without scales too
        near = 1e-5 if arch == "GptOssForCausalLM" else 0.0
        torch.testing.assert_close(replies[0][sequence], replies[1][sequence], rtol=0.0, atol=near)


def _checkpoint(folder: Path, names: dict[str, float], times: float = 1.0) -> Path:
    """A tiny Llama with V projections ``times`` as large, and scales under these names."""
    shutil.copytree(cached_tiny("LlamaForCausalLM", num_hidden_layers=2), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] = tensors[name] * times
        elif name.endswith("o_proj.weight"):
            tensors[name] = tensors[name] / times
    layer = "model.layers.{}.self_attn."
    for i in range(2):
        tensors |= {layer.format(i) + n: torch.tensor(v + i) for n, v in names.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_names_of_nemotron_h(tmp_path: Path) -> None:
    names = ("k_proj.k_scale", "v_proj.v_scale")
    tensors = {f"backbone.layers.3.mixer.{n}": torch.tensor(2.0) for n in names}
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint_scales(open_folder(tmp_path, "auto")) == {3: (2.0, 2.0)}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 2.0}, (0.5, 2.0)),
        ({"k_scale": 0.5, "v_scale": 2.0, "q_scale": 7.0}, (0.5, 2.0)),
        ({"attn.k_scale": 0.5, "attn.v_scale": 2.0}, (0.5, 2.0)),
        ({"kv_scale": 0.5}, (0.5, 0.5)),
        ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 2.0}, (0.5, 2.0)),
        ({"v_scale": 0.5}, (0.5, 0.5)),
        ({"k_scale": -2.0, "v_scale": -2.0}, None),
        ({"k_proj.input_scale": 3.0}, None),
    ],
)
def test_names_of_checkpoints(
    names: dict[str, float], wanted: tuple[float, float] | None, tmp_path: Path
) -> None:
    folder = _checkpoint(tmp_path / "m", names)
    scales = checkpoint_scales(open_folder(folder, "auto"))
    assert scales.get(0) == wanted and (wanted is not None) == bool(scales)
    if wanted:
        assert scales[1] == (wanted[0] + 1, wanted[1] + 1)
    model = build_model(describe(folder), CPU, torch.float32, bind("cpu"))
    load_weights(model, folder, progress=False)  # scales are no unknown tensors


def test_a_scale_a_head_is_refused(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m", {})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_scale is \[4\]"):
        checkpoint_scales(open_folder(folder, "auto"))


def _stated(**changes: Any) -> dict[str, Any]:
    factors = {"0": {"0": 0.5, "1": 2.0}}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors} | changes
    return {"model_type": "llama", "kv_cache": cache}


def test_a_file_of_scales(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(_stated()))
    assert file_scales(file, 2, "llama", 0, 1) == {0: (0.5, 0.5), 1: (2.0, 2.0)}
    assert file_scales(file, 2, "llama", 1, 2) == file_scales(file, 2, "llama", 0, 1)
    ranks = {str(r): {"0": r + 1.0, "1": r + 2.0} for r in range(2)}
    file.write_text(json.dumps(_stated(scaling_factor=ranks)))
    assert file_scales(file, 2, "llama", 1, 2)[0] == (2.0, 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "its form is"),
        ("[]", "its form is"),
        ("{}", "KeyError.*kv_cache.*its form is"),
        (json.dumps(_stated(dtype="int8")), "kv_cache.dtype is 'int8', not 'float8_e4m3fn'"),
        (json.dumps(_stated() | {"model_type": "qwen2"}), "model_type is 'qwen2', the model's"),
        (json.dumps(_stated(scaling_factor={"0": {"0": 1.0}})), "layer 1 is None, not a positive"),
        (json.dumps(_stated(scaling_factor={"0": {"0": 1, "1": -1}})), "layer 1 is -1"),
        (json.dumps(_stated(scaling_factor={"3": {}})), r"has ranks \[3\]; --tp-size 1 needs"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--quantization-param-path .*{said}"):
        file_scales(file, 2, "llama", 0, 1)
    with pytest.raises(ConfigError, match="No such file"):
        file_scales(tmp_path / "none", 2, "llama", 0, 1)


def _logprobs(folder: Path, **options: Any) -> Tensor:
    """Of the prompt's tokens."""
    options |= {
        "max_total_tokens": 1024,
        "cpu_threads": 1,
        "dtype": "float32",
        "log_level": "error",
    }
    with radixlm.Engine(model_path=str(folder), skip_tokenizer_init=True, **options) as engine:
        asked = {"input_ids": IDS[0], "return_logprob": True, "logprob_start_len": 0}
        reply = engine.generate(**asked, sampling_params={"max_new_tokens": 1})
    return torch.tensor([row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]])


def test_an_engine_uses_them(tmp_path: Path) -> None:
    """Values of some thousands saturate 8 bit floats without scales."""
    plain = _checkpoint(tmp_path / "plain", {}, times=3e3)
    scaled = _checkpoint(tmp_path / "scaled", {"k_scale": 0.01, "v_scale": 20.0}, times=3e3)
    want = _logprobs(plain)
    scaled_error = (_logprobs(scaled, kv_cache_dtype="fp8_e4m3") - want).abs().mean()
    lost_error = (_logprobs(plain, kv_cache_dtype="fp8_e4m3") - want).abs().mean()
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(_stated(scaling_factor={"0": {"0": 20.0, "1": 20.0}})))
    by_file = _logprobs(plain, kv_cache_dtype="fp8_e4m3", quantization_param_path=str(file))
    assert 0 < float(scaled_error) < 0.05 and 5 * scaled_error < lost_error
    assert 0 < float((by_file - want).abs().mean()) < float(lost_error)
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype is auto; use --kv-cache-dtype fp8_e4m3"
    ):
        _logprobs(plain, quantization_param_path=str(file))
