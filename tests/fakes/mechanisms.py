"""Families that together have every mechanism of the model records: each value of each field, a
number as zero, one or another.

Kernels, ranks, stages and files treat a model as its records say and never by its name. So their
tests over all families run these always, and the others with the slow tests; each family's own
numbers are always compared with Hugging Face (test_decoder.py). `mechanisms` of a family that
these do not have make `test_every_mechanism_has_a_family` fail: add the family here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from radixlm.base.record import Record
from tests.fakes.quick import slow_unless

REPRESENTATIVES = frozenset({
    *("AXK1ForCausalLM", "AXK2ForCausalLM", "Apertus1p5TextForCausalLM"),
    *("BailingHybridForCausalLM", "BeamForCausalLM", "BertLMHeadModel", "BitNetForCausalLM"),
    *("CTRLLMHeadModel", "CohereForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM"),
    *("DiffLlamaForCausalLM", "DogeForCausalLM", "Dots3NoteForCausalLM", "FalconForCausalLM"),
    *("FalconH1ForCausalLM", "FalconMambaForCausalLM", "Gemma2ForCausalLM", "Gemma3nForCausalLM"),
    *("Gemma4ForCausalLM", "Glm5NextForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM"),
    *("HYV4ForCausalLM", "HrmTextForCausalLM", "Inkling2LoopForCausalLM", "InklingForCausalLM"),
    *("JetMoeForCausalLM", "Kolibri1ForCausalLM", "LagunaForCausalLM", "Lfm2ForCausalLM"),
    *("Lfm2MoeForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM", "MambaForCausalLM"),
    *("MiMoV2FlashForCausalLM", "MiniMaxForCausalLM", "MiniMaxM3VLForCausalLM"),
    *("Mistral4ForCausalLM", "MistralLarge4ForCausalLM", "ModernBertDecoderForCausalLM"),
    *("MptForCausalLM", "MuseSparkForConditionalGeneration", "NanoChatForCausalLM"),
    *("NemotronHForCausalLM", "OlmoHybridForCausalLM", "PhimoeForCausalLM"),
    *("Qwen4ExpForConditionalGeneration", "RecurrentGemmaForCausalLM", "RwkvForCausalLM"),
    *("Step3p7ForConditionalGeneration", "Zamba2ForCausalLM", "ZambaForCausalLM"),
    *("ZayaForCausalLM", "xLSTMForCausalLM"),
})  # fmt: skip


def each_mechanism(families: Iterable[str]) -> list[Any]:
    """Parameters of a test: all families, those that bring no mechanism of their own as slow."""
    return slow_unless(REPRESENTATIVES.__contains__, families)


def mechanisms(record: Record) -> set[tuple[str, str, str]]:
    """(record, field, kind of value) of a record and of all records in it."""
    found: set[tuple[str, str, str]] = set()
    for field in record.__struct_fields__:
        value = getattr(record, field)
        inner = value if isinstance(value, (tuple, list)) else (value,)
        found.add((type(record).__name__, field, _kind(value)))
        for one in inner:
            if isinstance(one, Record):
                found |= mechanisms(one)
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, (int, float)):
        return {0: "zero", 1: "one"}.get(value, "number")
    if isinstance(value, (tuple, list, dict)):
        return "some" if value else "empty"
    return type(value).__name__
