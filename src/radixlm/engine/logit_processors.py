"""The logit processors that requests may name: the built-in ones and those of --logit-processor."""

from radixlm.config.grammar import GrammarConfig
from radixlm.wire.requests import THINKING_BUDGET

BUILTIN_PROCESSORS = {
    "disallowed_tokens": "radixlm.sampling.builtin:DisallowedTokens",
    "no_repeat_ngram": "radixlm.sampling.builtin:NoRepeatNgram",
    THINKING_BUDGET: "radixlm.sampling.builtin:ThinkingBudget",
    "transcript": "radixlm.sampling.whisper_timestamps:WhisperTimestamps",
}


def processor_targets(config: GrammarConfig) -> dict[str, str]:
    """Name -> "module:Class" of every logit processor that a request may name."""
    entries = (entry.partition("=") for entry in config.logit_processor)
    return BUILTIN_PROCESSORS | {name: target for name, _, target in entries}
