"""How each engine is found and started. Nothing is installed; missing parts are reported."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixlm.base.errors import ConfigError

WORKER = Path(__file__).parent / "openvino_worker.py"
MODEL_NAME = "m"  # model name in requests
KV_TOKENS = 8192  # more than the common cases need at once
NUM_SLOTS = 16  # of SLOT_TOKENS; with longer prompts one
SLOT_TOKENS = 2304

# With quantized weights the KV cache has 8 bits too, as OpenVINO's always has.
OUR_FLAGS = {
    16: (),
    8: ("--quantization", "w8a8_int8", "--kv-cache-dtype", "int8"),
    4: ("--quantization", "int4wo-128", "--kv-cache-dtype", "int8"),
}
GGUF = {16: ("F16", "f16"), 8: ("Q8_0",), 4: ("Q4_0",)}
OPENVINO = {16: "fp16", 8: "int8", 4: "int4"}


class Missing(ConfigError):
    """An engine or its model is missing; the message says how to make it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Paths, the number of threads of each engine, and the tokens of the longest case."""

    model: Path
    home: Path
    num_threads: int
    our_options: tuple[str, ...] = ()
    our_command: tuple[str, ...] = (sys.executable, "-m", "radixlm", "serve")
    longest: int = 0

    @property
    def num_slots(self) -> int:
        """Sequences at a time: engines set the memory of each aside."""
        return NUM_SLOTS if self.longest <= SLOT_TOKENS else 1

    def file(self, *parts: str, hint: str) -> Path:
        """A path below home. Missing with the hint if nothing is there."""
        path = self.home.joinpath(*parts)
        if not path.exists():
            raise Missing(f"{path} is missing: {hint}")
        return path


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` starts it; {port} is replaced by a free port. Without `is_http` it is a worker that
    reads JSON lines on standard input."""

    name: str
    command: tuple[str, ...]
    is_http: bool = True
    environment: tuple[tuple[str, str], ...] = ()

    def environ(self, num_threads: int) -> dict[str, str]:
        """All environment variables of the process."""
        fixed = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(num_threads)}
        return {**os.environ, **fixed, **dict(self.environment)}


def ours(setup: Setup, bits: int) -> Engine:
    """`radixlm serve` on the checkpoint."""
    command = [
        *setup.our_command, "--model-path", str(setup.model), "--host", "127.0.0.1",
        "--port", "{port}", "--cpu-threads", str(setup.num_threads), "--max-total-tokens",
        str(max(KV_TOKENS, setup.longest)), "--log-level", "warning",
        "--served-model-name", MODEL_NAME,
        *OUR_FLAGS[bits], *setup.our_options,
    ]  # fmt: skip
    return Engine("radixlm", tuple(command))


def llama_cpp(setup: Setup, bits: int) -> Engine:
    """llama-server with a slot for each of 16 requests."""
    build = "cmake -DGGML_NATIVE=ON of the sources in the package llama-cpp-python, targets"
    server = setup.file("src/lcpp-build/bin/llama-server", hint=f"{build} llama-server")
    files = [setup.home / "models" / f"q3-{name}.gguf" for name in GGUF[bits]]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        raise Missing(
            f"{files[0]} is missing: convert_hf_to_gguf.py of the same sources makes F16, "
            "llama-quantize the others"
        )
    threads = str(setup.num_threads)
    command = [
        str(server), "-m", str(found), "-np", str(setup.num_slots),
        "-c", str(setup.num_slots * max(SLOT_TOKENS, setup.longest)),
        "-no-kvu", "-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", "{port}",
        "--no-ui",
    ]  # fmt: skip
    return Engine("llama.cpp", tuple(command))


def openvino(setup: Setup, bits: int) -> Engine:
    """OpenVINO GenAI's continuous batching, in its own virtual environment."""
    python = setup.file(
        "venvs/ov/bin/python", hint="an environment with openvino-genai, optimum-intel and nncf"
    )
    kind = OPENVINO[bits]
    setup.file(
        f"models/ov-{kind}/openvino_model.xml",
        hint=f"optimum-cli export openvino --weight-format {kind} --task text-generation-with-past",
    )
    folder = setup.home / "models" / f"ov-{kind}"
    command = (str(python), str(WORKER), str(folder), str(setup.num_threads), str(setup.num_slots))
    return Engine("openvino", command, is_http=False)


PEERS: dict[str, Callable[[Setup, int], Engine]] = {
    "radixlm": ours,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
}


@dataclass(frozen=True, slots=True)
class Given:
    """A server of the user, by `--server NAME:BITS:COMMAND`; COMMAND has {port}."""

    name: str
    bits: int
    command: tuple[str, ...]


def parse_given(text: str) -> Given:
    """ConfigError for another form."""
    name, _, rest = text.partition(":")
    bits, _, command = rest.partition(":")
    if not name or bits not in ("16", "8", "4") or "{port}" not in command:
        raise ConfigError(f"--server {text!r}: expected NAME:16|8|4:COMMAND with {{port}} in it")
    return Given(name, int(bits), tuple(shlex.split(command)))


def find(
    names: Sequence[str], given: Sequence[Given], setup: Setup, bits: int
) -> tuple[list[Engine], list[str]]:
    """(engines that are installed, messages about missing ones)."""
    engines, missing = [], []
    for name in names:
        try:
            engines.append(PEERS[name](setup, bits))
        except Missing as error:
            missing.append(f"{name}, {bits} bit: {error}")
    engines += [Engine(one.name, one.command) for one in given if one.bits == bits]
    return engines, missing
