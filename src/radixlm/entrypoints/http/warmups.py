"""``--warmups``: functions that send requests through the engine before the server is ready."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.units import format_seconds
from radixlm.engine.dumped_prompts import prompts_of
from radixlm.intake.records import GenerateRequest
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.wire.sampling_params import SamplingParams

log = logging.getLogger(__name__)
WarmUp = Callable[[TokenizerManager], Awaitable[None]]
_VOICE_CHAT_TOKENS = range(4, 2048, 4)  # lengths of prompts, as of SGLang's function


async def voice_chat(intake: TokenizerManager) -> None:
    """A prompt of each length that a short spoken turn has, so that nothing is compiled later."""
    sampling = SamplingParams(max_new_tokens=30, temperature=0.8)
    rng = np.random.default_rng(0)
    for size in _VOICE_CHAT_TOKENS:
        if size + 30 > intake.facts.context_len:
            return
        ids = rng.integers(intake.facts.vocab, size=size).tolist()
        await intake.collect(GenerateRequest(sampling=sampling, input_ids=ids))


_NAMED: dict[str, WarmUp] = {"voice_chat": voice_chat}


def warm_ups(names: str | None) -> list[tuple[str, WarmUp]]:
    """The functions of ``--warmups``. A name that is not known is logged and left out, as SGLang
    does; ConfigError for a path whose function cannot be imported."""
    found: list[tuple[str, WarmUp]] = []
    for name in filter(None, (name.strip() for name in (names or "").split(","))):
        if ":" not in name and name not in _NAMED:
            log.warning("--warmups: no function %r; there are %s", name, ", ".join(_NAMED))
            continue
        found.append((name, _imported(name) if ":" in name else _NAMED[name]))
    return found


def of_file(path: str) -> tuple[str, WarmUp]:
    """Runs the prompts of --debug-tensor-dump-input-file, each for one token."""
    prompts = prompts_of(Path(path))

    async def run(intake: TokenizerManager) -> None:
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        for ids in prompts:
            request = GenerateRequest(sampling=sampling, input_ids=ids)
            await intake.collect(request)

    return "--debug-tensor-dump-input-file", run


def _imported(path: str) -> WarmUp:
    try:
        function: WarmUp = load(path)
    except Exception as error:  # whatever the module of the operator raises
        raise ConfigError(f"--warmups {path}: {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"--warmups {path}: write an async function of the TokenizerManager")
    return function


async def run_warm_ups(functions: list[tuple[str, WarmUp]], intake: TokenizerManager) -> None:
    """Run them in order. One that fails is logged: the server serves without it."""
    for name, function in functions:
        began_s = time.monotonic()
        try:
            await function(intake)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.warning("the warm-up %s failed", name, exc_info=True)
        else:
            log.info("warm-up %s: %s", name, format_seconds(time.monotonic() - began_s))
