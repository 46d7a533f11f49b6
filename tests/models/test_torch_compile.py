"""--enable-torch-compile: the same tokens as without, by two graphs; a model that cannot be
compiled warns and runs. A backend that runs the traced graph as it is replaces Torch's compilers,
except in the last test."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

import radixlm
from radixlm.executor.runner import Runner
from radixlm.kernels import cpu
from radixlm.models import compiled
from radixlm.models.compiled import CompiledSteps
from radixlm.models.decoder import DecoderModel
from radixlm.step.batch import ForwardBatch, InputEmbeds

PROMPTS = [[*range(5, 27)], [*range(5, 20), 7, 8, 9], [3, 4, 5, 6]]
WARNING = "--enable-torch-compile: "
NATIVE = pytest.mark.skipif(not cpu.available, reason="the C++ kernels are not built")
# torch's own modules warn about each other
pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


def engine(arch: str, **options: Any) -> radixlm.Engine:
    short = arch not in ("JambaForCausalLM", "LongcatFlashForCausalLM")
    known = {"num_hidden_layers": 2} if short else {}
    defaults: dict[str, Any] = {
        "max_total_tokens": 512, "max_running_requests": 4, "attention_backend": "torch_native",
        "kernel": ("all=reference",), "skip_tokenizer_init": True, "log_level": "warning",
    }  # fmt: skip
    defaults["model_path"] = str(cached_tiny(arch, **known))
    return radixlm.Engine(cpu_threads=1, **{**defaults, **options})


def tokens(one: radixlm.Engine, count: int, length: int = 6) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    made = one.generate(input_ids=PROMPTS[:count], sampling_params=params)
    return [answer["output_ids"] for answer in made]


def steps_of(one: radixlm.Engine) -> Any:
    runner = one._engine._serving.scheduler.executor  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    return runner.model


FAMILIES = {
    "Qwen3ForCausalLM": "eager",
    "Qwen3MoeForCausalLM": "eager",
    "GptOssForCausalLM": "eager",  # windows and sinks
    "DeepseekV2ForCausalLM": "aot_eager",  # latents; in-place writes become new tensors
}


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_same_tokens_by_two_graphs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", FAMILIES[arch])
    with engine(arch) as plain:
        want = [tokens(plain, count) for count in (1, 3, 2)]
    with engine(arch, enable_torch_compile=True) as one:
        assert [tokens(one, count) for count in (1, 3, 2)] == want
        steps = steps_of(one)
        assert isinstance(steps, CompiledSteps)
        assert steps.is_on and steps.num_graphs == 2


@pytest.mark.parametrize("ranks", ["tp_size", "pp_size"])
def test_several_ranks_run_as_they_are(ranks: str, capfd: pytest.CaptureFixture[str]) -> None:
    with engine("Qwen3ForCausalLM") as plain:
        want = tokens(plain, 2)
    with engine("Qwen3ForCausalLM", enable_torch_compile=True, **{ranks: 2}) as one:
        assert tokens(one, 2) == want
    assert "runs as it is: what ranks tell each other is not part" in capfd.readouterr().err


@NATIVE
def test_custom_ops_are_part_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.models.decoder.make_program", lambda *_: None)
    monkeypatch.setattr("radixlm.engine.torch_compile.why_no_program", lambda _: "refused")
    with engine("Mistral4ForCausalLM", kernel=(), attention_backend="cpu") as plain:
        want = tokens(plain, 3)
    names: set[str] = set()

    def noted(graph: Any, inputs: Any) -> Any:
        names.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", noted)
        options = {"kernel": (), "attention_backend": "cpu"}
        with engine("Mistral4ForCausalLM", enable_torch_compile=True, **options) as one:
            assert tokens(one, 3) == want
    ours = {name.split(".")[1] for name in names if name.startswith("radixlm.")}
    assert ours >= {"attend", "rope", "rms_norm", "linear", "experts"}


def test_triton_kernels_are_part_of_the_graphs() -> None:
    pytest.importorskip("triton")
    folder = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=1, vocab_size=64)
    options = {"kernel": ("all=triton",), "attention_backend": "triton", "model_path": str(folder)}
    options |= {"max_running_requests": 1, "max_total_tokens": 64}
    prompt, params = [[3, 4, 5]], {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
    with engine("Qwen3ForCausalLM", **options) as plain:
        want = plain.generate(input_ids=prompt, sampling_params=params)
    with engine("Qwen3ForCausalLM", enable_torch_compile=True, **options) as one:
        made = one.generate(input_ids=prompt, sampling_params=params)
        assert steps_of(one).num_graphs == 1 and steps_of(one).is_on
    assert made[0]["output_ids"] == want[0]["output_ids"]


def test_steps_of_more_rows_and_rare_ones_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("Qwen3ForCausalLM", enable_torch_compile=True, torch_compile_max_bs=2) as one:
        tokens(one, 1)
        steps = steps_of(one)
        run, step = steps._run, steps.step
        seen: list[int] = []
        sizes: list[int] = []

        def noted(batch: ForwardBatch, need_hidden: bool) -> Any:
            sizes.extend([batch.num_tokens] * batch.is_decode)
            return step(batch, need_hidden)

        monkeypatch.setattr(
            steps, "_run", lambda model, batch: seen.append(batch.num_tokens) or run(model, batch)
        )
        monkeypatch.setattr(steps, "step", noted)
        tokens(one, 3, 40)
        assert max(sizes) == 3  # they may have arrived one after the other
        tokens(one, 2, 40)
        assert seen == [size for size in sizes if size < 3] and 2 in seen
        seen.clear()
        params = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        embeds = torch.zeros(1, 4, 64).tolist()
        one.generate(input_embeds=embeds, sampling_params=params)
        assert seen == [1]
    field = {
        "embeds": InputEmbeds(torch.zeros(1, 64)),
        "bidirectional_spans": ((0, 1),),
        "feature_data": {"x": 1},
    }
    for name, value in field.items():
        batch = decode_batch()
        assert steps._takes(batch)
        setattr(batch, name, value)
        assert not steps._takes(batch)


def decode_batch() -> ForwardBatch:
    one = torch.zeros(1, dtype=torch.int64)
    return ForwardBatch(one, one, one, one, one, (), (), one, None, 1, 1, is_decode=True)  # type: ignore[arg-type]


def test_a_failed_compilation_warns_once_and_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no compiler of that name\nand more")

    with engine("Qwen3ForCausalLM") as plain:
        want = tokens(plain, 3)
    monkeypatch.setattr(compiled, "BACKEND", broken)
    with (
        caplog.at_level(logging.WARNING, "radixlm"),
        engine("Qwen3ForCausalLM", enable_torch_compile=True) as one,
    ):
        assert tokens(one, 3) == want and not steps_of(one).is_on
    (line,) = [r.message for r in caplog.records if r.message.startswith(WARNING)]
    assert line == f"{WARNING}steps run as they are: ValueError: no compiler of that name"


@pytest.mark.parametrize(("told", "cause"), [(True, "_TooMany: "), (False, "UserError: ")])
def test_a_model_that_reads_device_values_runs_uncompiled(
    told: bool, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads a number that changes every step, or a number from the device."""
    forward = DecoderModel.forward

    def counting(self: DecoderModel, batch: ForwardBatch) -> Tensor:
        number = batch.max_kv_len if told else batch.positions_T.sum().item()
        return forward(self, batch) * (1.0 if number > 0 else -number)

    with engine("Qwen3ForCausalLM") as plain:
        want = tokens(plain, 1, 12)
    monkeypatch.setattr(DecoderModel, "forward", counting)
    with (
        caplog.at_level(logging.WARNING, "radixlm"),
        engine("Qwen3ForCausalLM", enable_torch_compile=True) as one,
    ):
        assert tokens(one, 1, 12) == want
        steps = steps_of(one)
        assert not steps.is_on and steps.num_graphs <= compiled.MAX_GRAPHS
    (line,) = [r.message for r in caplog.records if r.message.startswith(WARNING)]
    assert cause in line


@pytest.mark.parametrize(
    ("arch", "options", "why"),
    [
        ("JambaForCausalLM", {}, "recurrent layers"),
        pytest.param(
            "LlamaForCausalLM",
            {"kernel": (), "attention_backend": "cpu"},
            "the C++ kernels",
            marks=NATIVE,
        ),
        ("LlamaForCausalLM", {"model_impl": "transformers"}, "not a native decoder"),
        ("LongcatFlashForCausalLM", {}, "routing with zero experts has no kernel"),
    ],
)
def test_models_without_graphs_say_why_at_start(
    arch: str, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(arch, **options) as plain:
        want = tokens(plain, 2)
    with (
        caplog.at_level(logging.WARNING, "radixlm"),
        engine(arch, enable_torch_compile=True, **options) as one,
    ):
        (line,) = [r.message for r in caplog.records if r.message.startswith(WARNING)]
        assert tokens(one, 2) == want
        assert why in line and not isinstance(steps_of(one), CompiledSteps)


@pytest.mark.slow
def test_inductor_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    with engine("Qwen3ForCausalLM") as plain:
        want = [tokens(plain, count) for count in (1, 3)]
    with engine("Qwen3ForCausalLM", enable_torch_compile=True) as one:
        assert [tokens(one, count) for count in (1, 3)] == want
        assert steps_of(one).is_on and steps_of(one).num_graphs == 2
