"""Architectures that transformers 5.17, the oldest that the project takes, lacks or has otherwise.
Tests that need them are skipped where the installed version is too old."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import transformers

# architecture -> the first version that writes its checkpoints under the names that it has now
CHECKPOINT = {
    "InklingForCausalLM": (5, 18),
    "Qwen4ExpForCausalLM": (5, 18),
    "Qwen4ExpForConditionalGeneration": (5, 18),
    "LongcatFlashForCausalLM": (5, 18),
    "Glm5NextForCausalLM": (5, 18),
    "MuseSparkForConditionalGeneration": (5, 20),
    "BailingHybridForCausalLM": (5, 20),
    "Kolibri1ForCausalLM": (5, 20),
    "BeamForCausalLM": (5, 20),
    "CohereCompassForCausalLM": (5, 21),
    "FlintForCausalLM": (5, 21),
    "Lfm3ForCausalLM": (5, 23),
    "Dots3NoteForCausalLM": (5, 23),
    "Apertus1p5TextForCausalLM": (5, 24),
    "LaraMiniForCausalLM": (5, 24),
    "Inkling2ForCausalLM": (5, 24),
    "Inkling2LoopForCausalLM": (5, 24),
    "MistralLarge4ForCausalLM": (5, 24),
    "DoryForCausalLM": (5, 24),
}
# architecture -> the first version that computes from them what it computes now
NUMBERS = {
    "Gemma3nForCausalLM": (5, 21),
    "Mamba2ForCausalLM": (5, 23),
    "BambaForCausalLM": (5, 23),
    "GraniteMoeHybridForCausalLM": (5, 23),
}


def skip_if_older(architecture: str, first: Mapping[str, tuple[int, int]]) -> None:
    """Skip the test if the installed transformers is older than ``first`` says."""
    wanted = first.get(architecture, (0, 0))
    major, minor = transformers.__version__.split(".")[:2]
    if (int(major), int(minor)) < wanted:
        pytest.skip(f"{architecture} needs transformers {wanted[0]}.{wanted[1]}")
