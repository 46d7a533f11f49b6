"""Models with latents as one C++ program: the numbers of the layers run one by one, whatever the
batch holds, however a prompt is cut, and behind cached pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.models.test_decoder import prompts, relative_error

from radixlm.arch.hf import describe
from radixlm.kernels import cpu
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind
from radixlm.models.build import Model, build_model
from radixlm.models.program.step import StepProgram
from radixlm.weights.load import load_weights

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MiniCPM3ForCausalLM",
    "YoutuForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
LENGTHS = (37, 1, 5, 22)


@pytest.fixture(params=native().supported_isas() if cpu.available else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native().isa()
    native().select_isa(request.param)
    yield request.param
    native().select_isa(before)


def runner(model: Model, use_program: bool, dtype: torch.dtype = torch.float32) -> PagedRunner:
    model.use_program = use_program
    return PagedRunner(model, "cpu", page_size=16, cache_dtype=dtype)


def with_plain_queries(folder: Path, dtype: torch.dtype) -> Model:
    """DeepSeek V2 as its small ones are, without latents of queries; random weights."""
    config = json.loads((cached_tiny("DeepseekV2ForCausalLM") / "config.json").read_text())
    config |= {"q_lora_rank": None, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(describe(folder), torch.device("cpu"), torch.float32, bind("cpu"))
    load_weights(model, folder, load_format="dummy", progress=False)
    return model


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_program_gives_the_numbers_of_the_layers(arch: str) -> None:
    """The projections and attention to the last bit; the sum of experts is in another order."""
    model = load_model(cached_tiny(arch), bind("cpu"))
    ids = prompts(model.decoder.vocab, LENGTHS)
    layers = runner(model, use_program=False).prefill(ids, num_chunks=3)
    assert model.program is None
    program = runner(model, use_program=True).prefill(ids, num_chunks=3)
    assert isinstance(model.program, StepProgram)
    has_experts = any(hasattr(block.ffn, "experts") for block in model.blocks)
    for sequence in ids:
        if has_experts:
            assert relative_error(program[sequence], layers[sequence]) < 2e-6
        else:
            assert torch.equal(program[sequence], layers[sequence])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_same_bits_on_every_processor(isa: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Ragged batches, one sequence, chunks, tokens one by one."""
    model = with_plain_queries(tmp_path, torch.float32 if dtype == torch.int8 else dtype)
    assert all(block.mixer.spec.q_rank == 0 for block in model.blocks)
    ids = prompts(model.decoder.vocab, LENGTHS)
    together = runner(model, True, dtype).prefill(ids)
    assert isinstance(model.program, StepProgram)
    cut = runner(model, True, dtype).prefill(ids, num_chunks=4)
    for sequence, tokens in ids.items():
        assert torch.equal(cut[sequence], together[sequence])
        alone = runner(model, True, dtype).prefill({sequence: tokens})
        assert torch.equal(alone[sequence], together[sequence])
    steps = runner(model, True, dtype)
    rows = [steps.step({0: [token]})[0] for token in ids[0]]
    assert torch.equal(torch.cat(rows), together[0])


def test_behind_cached_pages() -> None:
    """A second sequence on the first one's pages gets the bits of one that computed them."""
    model = load_model(cached_tiny("DeepseekV3ForCausalLM"), bind("cpu"))
    (prompt,) = prompts(model.decoder.vocab, (60,)).values()
    prefix, tails = prompt[:48], {1: prompt[48:], 2: prompt[50:58]}
    shared = runner(model, use_program=True)
    shared.prefill({0: prefix})
    for sequence in tails:
        shared.known[sequence] = list(prefix)
        for table in shared.pages:
            table[sequence] = list(table[0])
    got = shared.step(tails)
    for sequence, tail in tails.items():
        whole = runner(model, use_program=True).prefill({0: prefix + tail})[0]
        assert torch.equal(got[sequence], whole[len(prefix) :]), sequence


def test_wanted_rows_only() -> None:
    """``step`` computes the last block for few rows, to the same bits."""
    model = load_model(cached_tiny("DeepseekV2ForCausalLM"), bind("cpu"))
    one = runner(model, use_program=True)
    batch = one.batch(prompts(model.decoder.vocab, LENGTHS))
    with torch.inference_mode():
        one.backend.begin(batch)
        hidden = model.forward(batch)
        batch.logits_rows_R = torch.tensor([36, 2, 2])
        want = model.logits(hidden[batch.logits_rows_R])
        _, got = model.step(batch, need_hidden=False)
    assert got is not None and torch.equal(got, want)
