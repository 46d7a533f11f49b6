"""Language models behind towers that hear; the towers are Hugging Face's."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family
from radixlm.arch.families.composite import composite
from radixlm.arch.spec import Decoder

HEARING = (
    *("VoxtralForConditionalGeneration", "GlmAsrForConditionalGeneration"),
    *("Qwen3ASRForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
)


@family(*HEARING)
def hearing(c: Config) -> Decoder:
    """The text model's record."""
    return composite(c)
