"""Language models behind encoders that hear; the encoders are Hugging Face's."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.composite import composite
from radixlm.arch.families.media_layouts_audio import OMNIS
from radixlm.arch.spec import Decoder
from radixlm.base.record import replace

HEARING = (
    *("VoxtralForConditionalGeneration", "GlmAsrForConditionalGeneration"),
    *("Qwen3ASRForConditionalGeneration", *OMNIS),
    "GraniteSpeechForConditionalGeneration",
    *("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
)
# whose class leaves out the text model's scale of the logits
UNSCALED = ("GraniteSpeechForConditionalGeneration",)


def hearing(c: Config) -> Decoder:
    """The text model's record."""
    decoder = composite(c)
    return replace(decoder, logit_scale=1.0) if c.architecture in UNSCALED else decoder
