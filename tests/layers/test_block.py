"""What a block leaves for the next one's first norm to add: the same bits as a sum of its own, and
a decode step on a GPU's kernels that launches nothing for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.fakes.paged_runner import CPU, PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from radixlm.arch.spec import Attention, Block, Decoder, Mlp, Moe, Norm, Rope, SkipConnection
from radixlm.kernels.dispatch import bind
from radixlm.layers import block as block_module
from radixlm.layers.block import LAYOUTS, split_step
from radixlm.layers.residual import added
from radixlm.models.build import build_model
from radixlm.step.batch import MediaInputs
from radixlm.weights.load import load_weights

IDS: dict[int, Sequence[int]] = {0: [3, 9, 4, 1, 5, 9, 2, 6], 1: [8, 7]}
PLAIN = Attention(heads=4, kv_heads=2, head_dim=12, rope=Rope(8, 1e4))
DENSE = Mlp(40, "silu")
RMS = Norm(1e-6)
EXPERTS = Moe(6, 2, 20, "silu", renorm=True)
LAYER = Norm(1e-5, "layer", bias=True)
BARE = Norm(1e-6, "rms", affine=False)
MODELS = {
    "pre": Block(PLAIN, DENSE, RMS),
    "layer norms": Block(PLAIN, DENSE, LAYER),
    "factor": Block(PLAIN, EXPERTS, RMS, residual=0.4),
    "sandwich": Block(PLAIN, DENSE, BARE, "sandwich"),
    "beside": Block(PLAIN, DENSE, RMS, "sandwich", parallel_moe=EXPERTS),
    "parallel": Block(PLAIN, DENSE, LAYER, "parallel"),
    "parallel2": Block(PLAIN, DENSE, RMS, "parallel2"),
    "post": Block(PLAIN, DENSE, RMS, "post"),
    "scaled": Block(PLAIN, DENSE, RMS, out_scale=True),
    "mixer alone": Block(PLAIN, None, RMS),
}


def run_block_by_block(model: Any, batch: Any) -> torch.Tensor:
    """The model without anything left between its blocks."""
    x_TD, angles = model._embed(batch), model.ropes.angles(batch)
    for block in model.blocks:
        x_TD = block.run(x_TD, batch, angles)
    return model.norm.run(x_TD)


@pytest.mark.parametrize("name", MODELS)
def test_sums_that_wait_have_the_same_bits(name: str, tmp_path: Any) -> None:
    """Of every layout, and where layouts alternate, over both sets of kernels."""
    blocks = (MODELS[name], MODELS["post"], MODELS["pre"], MODELS[name])
    decoder = Decoder(70, 48, blocks, MODELS[name].norm, 64)
    for dtype, chosen in (
        (torch.bfloat16, {"all": "reference"}),
        (torch.float32, {"all": "reference"}),
        (torch.float32, {}),
    ):
        model = build_model(decoder, CPU, dtype, bind("cpu", chosen))
        load_weights(model, tmp_path, "dummy", progress=False)
        model.use_program = False
        runner = PagedRunner(model, cache_dtype=dtype)
        batch = runner.batch(IDS)
        with torch.inference_mode():
            runner.backend.begin(batch)
            assert torch.equal(model.forward(batch), run_block_by_block(model, batch))


def test_what_is_read_between_blocks_is_whole(tmp_path: Any) -> None:
    """A skip, and vectors that join behind a layer, find the residual with its sum."""
    blocks = (MODELS["pre"],) * 4
    decoders = [
        Decoder(70, 48, blocks, RMS, 64, skips=s) for s in ((), (SkipConnection(1, 3, 0.25),))
    ]
    models = [build_model(d, CPU, torch.float32, bind("cpu")) for d in decoders]
    for model in models:
        load_weights(model, tmp_path, "dummy", progress=False)
        model.use_program = False
    runner = PagedRunner(models[0])
    batch = runner.batch(IDS)
    deep_TD = torch.randn(len(batch.token_ids_T), 48)
    with torch.inference_mode():
        for model in models:
            runner.backend.begin(batch)
            x_TD, angles = model._embed(batch), model.ropes.angles(batch)
            for layer, block in enumerate(model.blocks):
                if layer == 1:
                    kept = x_TD.clone()
                if layer == 3 and model is models[1]:
                    x_TD = kept * 0.25 + x_TD * 0.75
                x_TD = block.run(x_TD, batch, angles)
                if layer == 0:
                    x_TD = x_TD + deep_TD
            batch.media = MediaInputs(deepstack_LTD=deep_TD[None])
            assert torch.equal(model.forward(batch), model.norm.run(x_TD))
            batch.media = None


class Counted(TorchDispatchMode):
    """Operations of torch that launch something on a GPU."""

    NOT = ("empty", "detach", "unbind", "lift", "_unsafe_view", "new_empty")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(self.NOT):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def launches(arch: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What a decode step of two sequences launches on a GPU's kernels, none of which runs."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    folder = cached_tiny(arch, num_hidden_layers=num_layers)
    model = load_model(folder, bind("cpu", {"all": "triton"}))
    runner = PagedRunner(model, "triton", 16)
    runner.batch(IDS)
    batch, counted = runner.batch({0: [3], 1: [4]}), Counted()

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        counted.found[self.fn.__name__] += 1

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted)
    with torch.inference_mode():
        runner.backend.begin(batch)
        counted.found.clear()
        with counted:
            model.forward(batch)
    monkeypatch.undo()
    return counted.found


ATTENDS = {"prepare_kernel": 1, "attention_kernel": 1}
A_LAYER = {
    "Qwen3ForCausalLM": {"norm_kernel": 2, "linear": 4, "gated_kernel": 1},
    "Gemma3ForCausalLM": {"norm_kernel": 4, "linear": 4, "gated_kernel": 1},
    "CohereForCausalLM": {"norm_kernel": 1, "linear": 4, "gated_kernel": 1, "add_": 1},
    "Qwen3MoeForCausalLM": {
        "norm_kernel": 2,
        "linear": 3,
        "route_kernel": 1,
        "gemv_up_kernel": 1,
        "gemv_down_kernel": 1,
    },
}


@pytest.mark.parametrize("arch", A_LAYER)
def test_a_layer_launches_nothing_for_its_sum(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a further layer costs, and no sum at the end of a step. Branches beside one another
    (Cohere) are summed by one launch."""
    few, more = (launches(arch, count, monkeypatch) for count in (2, 3))
    assert more - few == Counter(A_LAYER[arch] | ATTENDS)
    assert few["add"] == 0 and few["add_"] == 2 * A_LAYER[arch].get("add_", 0)


STEPS = "norm read renorm mix feed experts post sum conv add defer late cross".split()


def test_layouts_are_made_of_known_steps() -> None:
    """Every layout leaves as many branches as it joins, and numbers its norms from one."""
    more = [
        v for k, v in vars(block_module).items() if k.startswith("WITH_") or k.endswith("_ONLY")
    ]
    assert len(more) == 6
    for layout in (*LAYOUTS.values(), *more):
        words = [split_step(word) for word in layout.split()]
        assert {name for name, _ in words} <= set(STEPS)
        names = [name for name, _ in words]
        pushed = names.count("mix") + names.count("feed") + names.count("cross")
        assert pushed == names.count("add")
        assert names.count("experts") == names.count("sum")
        numbers = [number for _, number in words if number]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_pending_branches_are_added_in_place() -> None:
    x = torch.zeros(2, 3)
    assert added(x, None) is x and added(x, torch.ones(2, 3)) is x and bool((x == 1).all())
