"""Text models that transformers has only inside multimodal models, each with a language head."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput


@cache
def _glm5_next() -> Any:
    """The text model of GLM 5.3 Flash; its module is loaded on demand."""
    module = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")

    class Glm5NextForCausalLM(module.Glm5NextPreTrainedModel):
        config_class = transformers.Glm5NextTextConfig
        config: transformers.Glm5NextTextConfig

        def __init__(self, config: transformers.Glm5NextTextConfig) -> None:
            super().__init__(config)
            self.model = module.Glm5NextTextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
            return CausalLMOutput(logits=self.lm_head(hidden))

    Glm5NextForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    return Glm5NextForCausalLM


@cache
def _mistral_large4() -> Any:
    """The text model of Mistral Large 4 with the head of the whole."""
    module = importlib.import_module("transformers.models.mistral_large4.modeling_mistral_large4")

    class MistralLarge4ForCausalLM(module.MistralLarge4PreTrainedModel):
        config_class = transformers.MistralLarge4TextConfig
        config: transformers.MistralLarge4TextConfig

        def __init__(self, config: transformers.MistralLarge4TextConfig) -> None:
            super().__init__(config)
            self.model = module.MistralLarge4TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
            cap = self.config.final_logit_softcapping
            return CausalLMOutput(logits=cap * torch.tanh(self.lm_head(hidden) / cap))

    MistralLarge4ForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    return MistralLarge4ForCausalLM


_OWN = {"Glm5NextForCausalLM": _glm5_next, "MistralLarge4ForCausalLM": _mistral_large4}


def class_of(architecture: str) -> Any:
    """The class of an architecture, from transformers or from this module."""
    own = _OWN.get(architecture)
    return getattr(transformers, architecture) if own is None else own()
