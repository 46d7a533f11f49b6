"""Every architecture on the C++ kernels: close to the reference, and the same bit for bit however
tokens are batched and cut."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.decoder_configs import DECODER_CONFIGS
from tests.fakes.mechanisms import each_mechanism
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny
from tests.models.test_decoder import prompts, relative_error

from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.cpu.extension import native as native_module
from radixlm.kernels.dispatch import bind
from radixlm.models.build import Model
from radixlm.models.program.step import StepProgram, why_no_program
from radixlm.step.batch import InputEmbeds, MediaInputs
from radixlm.weights.load import load_weights

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

LENGTHS = (23, 1, 9, 17, 2, 5, 3, 7, 1, 1, 12, 4, 6, 2, 8, 1)


@pytest.mark.parametrize("arch", each_mechanism(ARCHITECTURES))
def test_close_to_the_reference_and_bit_invariant(arch: str) -> None:
    """Layer by layer, and as one program where one covers the model."""
    folder = cached_tiny(arch)
    model = load_model(folder, bind("cpu"))
    ids = prompts(model.decoder.vocab, LENGTHS)
    expected = PagedRunner(load_model(folder)).prefill({0: ids[0]})[0]
    has_program = not why_no_program(model)
    model.use_program = False
    if (
        arch in DECODER_CONFIGS
    ):  # what no kernel knows runs in torch, whose sums feel their neighbours
        together = PagedRunner(model, "cpu", page_size=16).prefill(ids, num_chunks=3)
        assert relative_error(together[0], expected) < 1e-5
    else:
        check_invariance(model, ids, expected)
    if has_program:
        model.use_program = True
        check_invariance(model, ids, expected)


def check_invariance(model: Model, ids: dict[int, list[int]], expected: torch.Tensor) -> None:
    together = PagedRunner(model, "cpu", page_size=16).prefill(ids, num_chunks=3)
    assert (model.program is not None) == model.use_program
    assert relative_error(together[0], expected) < 1e-5
    alone = PagedRunner(model, "cpu", page_size=32, seed=1)
    for sequence in (0, 3):
        whole = alone.prefill({sequence: ids[sequence]})[sequence]
        assert torch.equal(whole, together[sequence]), "alone or among 15 others, in 1 or 3 chunks"
    stepped = PagedRunner(model, "cpu", page_size=16, seed=2)
    rows = [stepped.step({0: [token]})[0] for token in ids[0]]
    assert torch.equal(torch.cat(rows), together[0]), "decoded one by one or prefilled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_and_cache(dtype: torch.dtype) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", dtype=dtype)
    model, reference = load_model(folder, bind("cpu")), load_model(folder)
    ids = prompts(model.decoder.vocab)
    ours = PagedRunner(model, "cpu", 16, cache_dtype=dtype).prefill(ids, 2)
    theirs = PagedRunner(reference, cache_dtype=dtype).prefill(ids, 2)
    for sequence in ids:
        # Both round keys and values, from numbers that differ in their last bits; in dot products
        # of pairs the activations of bfloat16 weights are bfloat16 too.
        rounds = dtype == torch.bfloat16 and native_module().isa() in ("amx", "avx512bf16")
        assert relative_error(ours[sequence], theirs[sequence]) < (3e-2 if rounds else 5e-3)


def test_threads_change_nothing() -> None:
    model = load_model(cached_tiny("Qwen3MoeForCausalLM"), bind("cpu"))
    ids = prompts(model.decoder.vocab)
    native = native_module()
    before = native.max_threads()
    try:
        results = []
        for threads in (1, 3):
            native.set_max_threads(threads)
            results.append(PagedRunner(model, "cpu", 16).prefill(ids))
    finally:
        native.set_max_threads(before)
    assert all(torch.equal(results[0][s], results[1][s]) for s in ids)


COVERED = (
    *("Qwen3ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "YoutuForCausalLM"),
    *("Qwen2MoeForCausalLM", "Ministral3ForCausalLM", "Mistral4ForCausalLM"),
    *("LongcatFlashForCausalLM", "KimiLinearForCausalLM", "Qwen3_5ForCausalLM"),
    *("FalconH1ForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM", "Llama4ForCausalLM"),
    *("Gemma4ForCausalLM", "ApertusForCausalLM", "PhimoeForCausalLM"),
    *("OpenAIGPTLMHeadModel", "MiniMaxForCausalLM", "DiffLlamaForCausalLM", "XGLMForCausalLM"),
    *("CTRLLMHeadModel", "ModernBertDecoderForCausalLM", "Gemma3nForCausalLM"),
)
# an index of latents, several residual streams, a kind of recurrence
REFUSED = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "RwkvForCausalLM")


@pytest.mark.parametrize("arch", (*COVERED, *REFUSED))
def test_programs_cover_what_they_say(arch: str) -> None:
    model = load_model(cached_tiny(arch), bind("cpu"))
    PagedRunner(model, "cpu", 16).step({0: [5, 6]})
    assert isinstance(model.program, StepProgram) == (arch in COVERED)


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM"])
def test_a_step_gives_the_wanted_rows_only(arch: str) -> None:
    """``step`` equals ``forward`` and ``logits``, bit for bit, hidden states or not."""
    model = load_model(cached_tiny(arch), bind("cpu"))
    ids = prompts(model.decoder.vocab)
    runner = PagedRunner(model, "cpu", 16)
    batch = runner.batch(ids)
    with torch.inference_mode():
        runner.backend.begin(batch)
        hidden = model.forward(batch)
        batch.logits_rows_R = torch.tensor([40, 3, 3])
        want = model.logits(hidden[batch.logits_rows_R])
        none, logits = model.step(batch, need_hidden=False)
        again, same = model.step(batch, need_hidden=True)
        batch.logits_rows_R = torch.tensor([], dtype=torch.int64)
        _, nothing = model.step(batch, need_hidden=False)
    assert none is None and again is not None and logits is not None and same is not None
    assert torch.equal(logits, want) and torch.equal(same, want) and torch.equal(again, hidden)
    assert nothing is None


def test_a_program_follows_its_pools() -> None:
    """New pools, or another backend, mean a new program, not stale addresses."""
    model = load_model(cached_tiny("Qwen3ForCausalLM"), bind("cpu"))
    ids = prompts(model.decoder.vocab)
    runner = PagedRunner(model, "cpu", 16)
    first = runner.prefill(ids)
    (group,) = model.kv_groups
    runner.backend.make_pool(group, 256, 16, torch.float32)
    for sequence in ids:
        runner.known[sequence] = []
    again = runner.prefill(ids)
    other = PagedRunner(model, "torch_native").prefill(ids)
    for sequence in ids:
        assert torch.equal(first[sequence], again[sequence])
        assert relative_error(other[sequence], first[sequence]) < 1e-5


@pytest.mark.parametrize("with_mask", [True, False])
def test_given_embeddings_in_a_program(with_mask: bool) -> None:
    model = load_model(cached_tiny("Qwen3ForCausalLM"), bind("cpu"))
    (ids,) = prompts(model.decoder.vocab, (14,)).values()
    swapped = [*ids[:5], 7, 8, 9, *ids[8:]]
    embeds = model.embed.run(torch.tensor(swapped))
    mask = torch.zeros(14, dtype=torch.bool)
    mask[5:8] = True
    inputs = InputEmbeds(embeds, mask if with_mask else None)
    plain = PagedRunner(model, "cpu", 16).step({0: swapped})[0]
    given = PagedRunner(model, "cpu", 16).step({0: ids}, embeds=inputs)[0]
    assert torch.equal(given, plain)


def test_embeddings_that_are_added_run_layer_by_layer() -> None:
    """The program replaces rows; it cannot add to them (``Decoder.add_media_embeds``)."""
    (ids,) = prompts(384, (14,)).values()
    mask = torch.zeros(14, dtype=torch.bool)
    mask[5:8] = True
    results = []
    for use_program in (True, False):
        model = load_model(cached_tiny("Qwen3ForCausalLM"), bind("cpu"))
        model.decoder = replace(model.decoder, add_media_embeds=True)
        model.use_program = use_program
        inputs = InputEmbeds(model.embed.run(torch.tensor(ids)) * 0.5, mask)
        runner = PagedRunner(model, "cpu", 16)
        results.append(runner.step({0: ids}, embeds=inputs, media=MediaInputs(mask))[0])
    assert torch.equal(*results)


def test_new_weights_mean_a_new_program() -> None:
    first, second = (cached_tiny("Qwen3ForCausalLM", seed=s) for s in (0, 1))
    model = load_model(first, bind("cpu"))
    ids = prompts(model.decoder.vocab)
    runner = PagedRunner(model, "cpu", 16)
    runner.step(ids)
    load_weights(model, second, progress=False)
    again = PagedRunner(model, "cpu", 16)
    again.backend = runner.backend
    got = again.step(ids)
    want = PagedRunner(load_model(second, bind("cpu")), "cpu", 16).step(ids)
    assert all(torch.equal(got[s], want[s]) for s in ids)
