"""RadixLM: a language-model serving engine.

``Engine`` is the engine in your program, ``ServerArgs`` and ``SamplingParams`` are its options;
``function``, ``gen``, ``select`` and others write programs over models (docs/frontend.md). All are
imported when first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing would take longer to import than the rest of this file
if TYPE_CHECKING:  # for completion and type checkers
    from typing import Any

    from radixlm.config.server_args import ServerArgs as ServerArgs
    from radixlm.entrypoints.offline import Engine as Engine
    from radixlm.lang.api import *  # noqa: F403
    from radixlm.wire.sampling_params import SamplingParams as SamplingParams

__version__ = "0.2.0"
_API = (
    "function gen gen_int gen_string select template tool_loop image video separate_reasoning "
    "system user assistant system_begin system_end user_begin user_end assistant_begin "
    "assistant_end set_default_backend flush_cache get_server_info"
).split()
_CHOICES = "token_length_normalized greedy_token_selection unconditional_likelihood_normalized"
_BACKENDS = "radixlm.lang.backend"
_LAZY = {
    "Engine": "radixlm.entrypoints.offline:Engine",
    "ServerArgs": "radixlm.config.server_args:ServerArgs",
    "SamplingParams": "radixlm.wire.sampling_params:SamplingParams",
    "Runtime": f"{_BACKENDS}.runtime_endpoint:Runtime",
    "RuntimeEndpoint": f"{_BACKENDS}.runtime_endpoint:RuntimeEndpoint",
    "OpenAI": f"{_BACKENDS}.openai:OpenAI",
    "Crusoe": f"{_BACKENDS}.openai:Crusoe",
    "Anthropic": f"{_BACKENDS}.anthropic:Anthropic",
    "LiteLLM": f"{_BACKENDS}.litellm:LiteLLM",
    "VertexAI": f"{_BACKENDS}.vertexai:VertexAI",
    "ProgramError": "radixlm.lang.budget:ProgramError",
    "Cassette": "radixlm.lang.cassette:Cassette",
    "global_config": "radixlm.lang.global_config:global_config",
    **{name: f"radixlm.lang.api:{name}" for name in _API},
    **{name: f"radixlm.lang.choices:{name}" for name in _CHOICES.split()},
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: ``import radixlm`` stays quick."""
    if name in _LAZY:
        module, _, attr = _LAZY[name].partition(":")
        value = globals()[name] = getattr(import_module(module), attr)
        return value
    raise AttributeError(f"module 'radixlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What completion offers: public names and modules that are imported already."""
    hidden = ("TYPE_CHECKING", "annotations", "import_module")
    shown = {name for name in globals() if name not in hidden}
    return sorted({*_LAZY, *(name for name in shown if not name.startswith("_") or "__" in name)})
