"""Adapters of experts and of latent attention's kv_b: exact against merged weights in every format
of PEFT, and the same bits in any company in the C++ program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.lora.adapter import read_adapter
from radixlm.lora.inspect import targets_of
from radixlm.quant.load_time import make_scheme
from tests.fakes.lora_adapters import merged, write_adapter, write_folder
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model, write_tokenizer
from tests.lora.test_run import Adapted

RANK, SCALE = 3, 1.5
FUSED = ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
         "Qwen3NextForCausalLM", "Glm4MoeForCausalLM",
         "NemotronHForCausalLM"]  # fmt: skip  # its up and down have each other's sizes
LATENT = ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]


def experts_of(model: Any) -> dict[str, Tensor]:
    """The parameters of a reference model that hold all experts, by name."""
    found = {
        name: tensor.data
        for name, tensor in model.named_parameters()
        if re.search(r"experts\.(gate_up|up|down)_proj$", name)
    }
    assert found
    return found


def stacked_adapter(base: Path, folder: Path, seed: int = 0) -> Path:
    """An adapter with target_parameters, named as PEFT nests its wrappers: the parameter that the
    module declares first is the inner one."""
    generator = torch.Generator().manual_seed(seed)
    tensors, experts = {}, experts_of(reference_model(base))
    for name, stacked in experts.items():
        module, _, own = name.rpartition(".")
        count, (num_out, num_in) = len(stacked), stacked.shape[1:]
        if is_transposed(base):
            num_out, num_in = num_in, num_out
        inner = "" if own == "down_proj" else ".base_layer"
        for half, shape in (("A", (RANK * count, num_in)), ("B", (num_out, RANK * count))):
            key = f"base_model.model.{module}{inner}.lora_{half}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * 0.1
    names = sorted({".".join(name.split(".")[-2:]) for name in experts})
    config = {"r": RANK, "lora_alpha": RANK * SCALE, "target_parameters": names}
    return write_folder(folder, config, tensors)


def is_transposed(base: Path) -> bool:
    return "GptOss" in str(base)


def with_experts(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with peft's ``ParamWrapper.get_delta_weight`` added."""
    model, tensors = reference_model(base), load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, param in experts_of(model).items():
            module, _, own = name.rpartition(".")
            inner = "" if own == "down_proj" else ".base_layer"
            key = f"base_model.model.{module}{inner}.lora_"
            a, b = (tensors[f"{key}{half}.weight"].double() for half in "AB")
            a_ERI = a.reshape(len(param), -1, a.shape[-1])
            b_ORE = b.reshape(len(b), -1, len(param))
            place = "eio" if is_transposed(base) else "eoi"
            param += (torch.einsum(f"ore,eri->{place}", b_ORE, a_ERI) * SCALE).to(param.dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def per_expert(base: Path, adapter: Path, folder: Path) -> Path:
    """The same adapter with a module for each expert's gate, up and down."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    found: dict[str, Tensor] = {}
    for name, stacked in experts_of(reference_model(base)).items():
        module, _, own = name.rpartition(".")
        key = f"{module}{'.base_layer' if own == 'gate_up_proj' else ''}.lora_"
        a, b = (tensors[f"base_model.model.{key}{half}.weight"] for half in "AB")
        for expert in range(len(stacked)):
            one_a = a.reshape(len(stacked), RANK, -1)[expert]
            one_b = b.reshape(len(b), RANK, -1)[:, :, expert]
            names = ["gate_proj", "up_proj"] if own == "gate_up_proj" else ["down_proj"]
            for part, rows in zip(names, one_b.chunk(len(names)), strict=True):
                at = f"base_model.model.{module}.{expert}.{part}.lora_"
                found[f"{at}A.weight"], found[f"{at}B.weight"] = one_a.clone(), rows.contiguous()
    return write_folder(folder, {"r": RANK, "lora_alpha": RANK * SCALE}, found)


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("arch", FUSED)
def test_parameters_of_all_experts(arch: str, kernels: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folder = stacked_adapter(base, tmp_path / "a")
    adapted = Adapted(base, [folder], kernels)
    got = adapted.run({0: 0, 1: -1})
    whole = Adapted(with_experts(base, folder, tmp_path / "m"), [], kernels).run({0: -1})
    assert (got[0] - whole[0]).abs().max() < 1e-4
    assert (got[0] - got[1]).abs().max() > 1e-2
    if not kernels:
        assert torch.equal(Adapted(base, []).run({1: -1})[1], got[1])
        assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])


@pytest.mark.parametrize("own", ["up_proj", "down_proj"])
def test_one_of_two_parameters_of_each_others_size(own: str, tmp_path: Path) -> None:
    """The config tells which it is, not the tensors."""
    base = cached_tiny("NemotronHForCausalLM")
    both = stacked_adapter(base, tmp_path / "a")
    left = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in load_file(both / "adapter_model.safetensors").items()
        if (".base_layer" in name) == (own == "up_proj")
    }
    config = {"r": RANK, "lora_alpha": RANK * SCALE, "target_parameters": [f"experts.{own}"]}
    one = write_folder(tmp_path / "b", config, left)
    parts = read_adapter(one, targets_of(base)).parts
    assert parts and all(path.endswith(own.removesuffix("_proj")) for path in parts)


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_modules_of_single_experts(arch: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    whole = stacked_adapter(base, tmp_path / "a")
    single = per_expert(base, whole, tmp_path / "b")
    adapted = Adapted(base, [whole, single])
    got = adapted.run({0: 0, 3: 1, 1: -1})
    wanted = adapted.run({3: 0})
    torch.testing.assert_close(got[3], wanted[3], rtol=1e-5, atol=1e-5)
    assert (got[3] - adapted.run({3: -1})[3]).abs().max() > 1e-2


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_company_changes_no_bit(arch: str, tmp_path: Path) -> None:
    """Adapters of experts beside others, in chunks; a program and its layers agree."""
    base = cached_tiny(arch)
    folders = [stacked_adapter(base, tmp_path / f"{i}", i) for i in range(3)]
    folders.append(write_adapter(base, tmp_path / "plain", 4, r"[qv]_proj$"))
    adapted = Adapted(base, folders)
    owners = {s: s % 5 - 1 for s in range(8)}
    together = adapted.run(owners)
    assert adapted.model.program is not None
    for sequence, owner in owners.items():
        assert torch.equal(adapted.run({sequence: owner}, 3)[sequence], together[sequence])
    adapted.model.use_program, adapted.model.program = False, None
    layers = adapted.run(owners)
    for sequence in owners:
        torch.testing.assert_close(layers[sequence], together[sequence], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8wo", "w8a8_int8"])
def test_quantized_experts(quantization: str, tmp_path: Path) -> None:
    """Base rows keep their bits; the others are as near to merged weights as these are."""
    base = cached_tiny("Qwen3MoeForCausalLM")
    folder, scheme = stacked_adapter(base, tmp_path / "a"), make_scheme(quantization)
    adapted, plain = Adapted(base, [folder], scheme=scheme), Adapted(base, [], scheme=scheme)
    got, exact = adapted.run({0: 0, 1: -1}), Adapted(base, [folder]).run({0: 0, 1: -1})
    assert torch.equal(got[1], plain.run({1: -1})[1])
    assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])
    errors = [(got[s] - exact[s]).norm() / exact[s].norm() for s in (0, 1)]
    assert errors[0] < 2 * errors[1] < 0.4, errors
    assert (got[0] - got[1]).norm() > 3 * (got[0] - exact[0]).norm()


def test_rank_1_of_the_up_projection_is_read(tmp_path: Path) -> None:
    base = cached_tiny(LATENT[0])
    folder = write_adapter(base, tmp_path / "a", 1, r"kv_b_proj$")
    assert read_adapter(folder, targets_of(base)).max_rank == 1


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("arch", LATENT)
def test_the_up_projection_of_latents(arch: str, kernels: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folder = write_adapter(base, tmp_path / "a", 3, r"kv_b_proj$|q_b_proj$", size=0.2)
    adapted = Adapted(base, [folder], kernels)
    got = adapted.run({0: 0, 1: -1})
    whole = Adapted(merged(base, folder, tmp_path / "m"), [], kernels).run({0: -1})
    assert (got[0] - whole[0]).abs().max() < 1e-4
    assert (got[0] - got[1]).abs().max() > 1e-2
    if not kernels:
        assert adapted.model.program is not None
        assert torch.equal(Adapted(base, []).run({1: -1})[1], got[1])
        assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    base = cached_tiny("Qwen3MoeForCausalLM")
    folder = stacked_adapter(base, tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(k for k in tensors if k.endswith("experts.lora_A.weight"))
    save_file({**tensors, key: tensors[key][:-1]}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_A is \[\d+, \d+\], lora_B"):
        read_adapter(folder, targets_of(base))
    save_file({**tensors, key: torch.ones(12, 33)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="without a place in the model"):
        read_adapter(folder, targets_of(base))
    latent = cached_tiny(LATENT[0])
    dora = write_adapter(latent, tmp_path / "b", 3, r"kv_b_proj$", use_dora=True)
    with pytest.raises(CheckpointError, match=r"DoRA and biases of .* kv_b are not supported"):
        read_adapter(dora, targets_of(latent))
