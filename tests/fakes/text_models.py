"""Text models that transformers has only behind towers, with a head of their own."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.glm5_next import modeling_glm5_next as glm5_next


class Glm5NextForCausalLM(glm5_next.Glm5NextPreTrainedModel):
    """The text model of GLM 5.3 Flash."""

    config_class = transformers.Glm5NextTextConfig
    config: transformers.Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: transformers.Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = glm5_next.Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


OWN = {"Glm5NextForCausalLM": Glm5NextForCausalLM}


def class_of(architecture: str) -> Any:
    """The class of an architecture: of transformers, or of this module."""
    return OWN.get(architecture) or getattr(transformers, architecture)
