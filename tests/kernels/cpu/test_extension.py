"""Status of the C++ extension, with it and without."""

import json
import subprocess
import sys

import pytest
import torch
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm import Engine
from radixlm.base.errors import ConfigError
from radixlm.kernels.cpu import available, describe, extension, isa, reason
from radixlm.kernels.cpu.extension import native

WITHOUT = """
import sys
sys.modules["radixlm._cpu"] = None
from radixlm.kernels.cpu import available, describe, reason
from radixlm.kernels.cpu.extension import native
from radixlm.base.errors import ConfigError
assert not available and "pip install" in reason and describe()["available"] is False
try:
    native()
except ConfigError:
    print("refused")
"""


def test_the_best_supported_instruction_set_runs() -> None:
    facts = describe()
    assert available and not reason and facts["isa"] == isa
    assert set(facts["supported"]) <= set(facts["compiled"])
    assert "portable" in facts["supported"] and isa in facts["supported"]
    with pytest.raises(ValueError, match="not compiled"):
        native().select_isa("abacus")


def test_a_missing_extension_is_reported_without_an_error() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert run.stdout.strip() == "refused", run.stderr


SERVES = """
import json, sys
sys.modules["radixlm._cpu"] = None
from radixlm.entrypoints.offline import Engine
from tests.kernels.cpu.test_extension import adapted
for quantization in (None, "w8a8_int8"):
    with Engine(model_path=sys.argv[1], quantization=quantization) as engine:
        params = {"max_new_tokens": 3, "ignore_eos": True}
        made = engine.generate(input_ids=[5, 6, 7], sampling_params=params)
        print(engine.config.execute.attention_backend, made["meta_info"]["completion_tokens"])
print(json.dumps(adapted()))
"""


def adapted() -> list[list[int]]:
    """Tokens of a prompt with an adapter, and without."""
    adapter = "upper=zoo/models/radix-tiny-lora-upper"
    with Engine(model_path="radix-tiny", lora_paths=[adapter], cpu_threads=1) as engine:
        params = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
        chat = "<|im_start|>user\nHello! Who are you?<|im_end|>\n<|im_start|>assistant\n"
        made = engine.generate([chat] * 2, params, lora_path=["upper", None])
        return [one["output_ids"] for one in made]


def test_without_the_extension_torch_serves_with_one_warning() -> None:
    """A warning of each engine; the third one's adapters change the same tokens."""
    command = [sys.executable, "-c", SERVES, str(cached_tiny("Qwen3ForCausalLM"))]
    run = subprocess.run(command, capture_output=True, text=True)
    *served, tokens = run.stdout.splitlines()
    assert served == ["torch_native 3"] * 2, run.stderr
    warnings = [line for line in run.stderr.splitlines() if "_cpu" in line]
    assert len(warnings) == 3, warnings
    for warning in warnings:
        assert "no fast kernels" in warning and "torch reference runs instead" in warning
    with_adapter, plain = adapted()
    assert json.loads(tokens) == [with_adapter, plain] and with_adapter != plain


def test_the_environment_picks_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extension.ISA_VARIABLE, "abacus")
    with pytest.raises(ConfigError, match="choose one of"):
        extension._load()


def test_ceilings_are_measured() -> None:
    memory = torch.ones(1 << 16)
    read = native().measure(0, memory.data_ptr(), memory.nbytes, 1)
    assert read > 0 and native().measure(1, 0, 1000, 2) > 0
    native().advise_huge(memory.data_ptr(), memory.nbytes)
    assert bool((memory == 1).all())


@pytest.mark.parametrize(("first", "count"), [(0, 3), (2, 1), (3, -1), (-1, 1), (1, 2)])
def test_a_step_runs_only_operations_that_there_are(first: int, count: int) -> None:
    program, step = native().Program(), native().Step()
    x = program.buffer(16)
    for scale in (2.0, 3.0):
        program.scale(x, 0, 16, scale)
    step.first_op, step.num_ops = first, count
    with pytest.raises(ValueError, match="of a program of 2"):
        program.run(step)
    step.first_op, step.num_ops = 1, 1
    program.run(step)
