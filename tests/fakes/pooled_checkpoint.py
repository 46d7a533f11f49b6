"""Tiny random checkpoints of embedding and reward models, and their results in Hugging Face.

`ENCODERS` and `HEADS` map an architecture to the settings of its tiny config.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from radixlm.arch.families.heads import base_of
from radixlm.arch.registry import BASE_DECODERS, DECODERS_WITH_HEADS
from tests.fakes.tiny_checkpoint import ARCHITECTURES, VOCAB, cached_tiny
from tests.fakes.unusual_configs import EMBEDDING_GEMMA2, whole

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
_DISTIL = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96} | dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
)
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4} | dict.fromkeys(
    SHAPE
)
_T5 |= {"vocab_size": VOCAB, "pad_token_id": 0}
_PADDED = {"pad_token_id": 1}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
_DEBERTA |= {"position_buckets": 16, "position_biased_input": False}
_ESM_2 = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 7}

ENCODERS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForSequenceClassification": {"num_labels": 3},
    "RobertaModel": _PADDED,
    "RobertaForSequenceClassification": {**_PADDED, "num_labels": 1},
    "XLMRobertaModel": _PADDED,
    "XLMRobertaForSequenceClassification": {**_PADDED, "num_labels": 1},
    "CamembertModel": _PADDED,
    "CamembertForSequenceClassification": _PADDED,
    "XLMRobertaXLModel": _PADDED,
    "XLMRobertaXLForSequenceClassification": _PADDED,
    "ElectraModel": {"embedding_size": 32},
    "ElectraForSequenceClassification": {"embedding_size": 64},
    "DistilBertModel": _DISTIL,
    "DistilBertForSequenceClassification": _DISTIL,
    "AlbertModel": {"embedding_size": 32},
    "AlbertForSequenceClassification": {"embedding_size": 32},
    "MPNetModel": _PADDED,
    "MPNetForSequenceClassification": _PADDED,
    "DebertaV2Model": {**_DEBERTA, "norm_rel_ebd": "layer_norm"},
    "DebertaV2ForSequenceClassification": {**_DEBERTA, "position_buckets": -1},
    "T5EncoderModel": {**_T5, "feed_forward_proj": "gated-gelu"},
    "ModernBertModel": {"local_attention": 8},
    "ModernBertForSequenceClassification": {"local_attention": 8, "classifier_pooling": "mean"},
    "NomicBertModel": {},
    "NomicBertForSequenceClassification": {},
    "GteModel": {},
    "GteForSequenceClassification": {"type_vocab_size": 0},
    "JinaEmbeddingsV3Model": {},
    "JinaEmbeddingsV3ForSequenceClassification": {},
    "EmbeddingGemma2Model": whole(EMBEDDING_GEMMA2, vision_config=None),
    "EmbeddingGemma2TextModel": EMBEDDING_GEMMA2,
    "ErnieModel": {},
    "ErnieForSequenceClassification": {"num_labels": 3, "use_task_id": True},
    "Data2VecTextModel": _PADDED,
    "Data2VecTextForSequenceClassification": _PADDED,
    "MegatronBertModel": {},
    "MegatronBertForSequenceClassification": {},
    "RobertaPreLayerNormModel": _PADDED,
    "RobertaPreLayerNormForSequenceClassification": {**_PADDED, "num_labels": 1},
    "RemBertModel": {"input_embedding_size": 32},
    "RemBertForSequenceClassification": {"input_embedding_size": 64},
    "EuroBertModel": {"num_key_value_heads": 2, "mlp_bias": True},
    "EuroBertForSequenceClassification": {"num_key_value_heads": 2},
    "RoFormerModel": {"embedding_size": 32},
    "RoFormerForSequenceClassification": {"hidden_act": "relu"},
    "EsmcModel": {"num_hidden_layers": 5},
    "EsmcForSequenceClassification": {"num_labels": 3},
    "MT5EncoderModel": _T5,
    "UMT5EncoderModel": _T5,
    "EsmModel": {**_PADDED, **_ESM_2},
    "EsmForSequenceClassification": {**_PADDED, "emb_layer_norm_before": True},
}
_FEW = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA3 = {**_FEW, "head_dim": 24, "sliding_window": 12, "layer_types": None}
HEADS: dict[str, dict[str, Any]] = {
    **{
        f"{stem}{kind}": {
            **_FEW,
            **ARCHITECTURES.get(base_of(f"{stem}Model"), {}),
            **({"head_dim": 16} if stem.startswith("HunYuan") else {}),
        }
        for stem in DECODERS_WITH_HEADS.split()
        for kind in ("Model", "ForSequenceClassification")
    },
    **{
        f"{stem}Model": {**_FEW, **ARCHITECTURES[base_of(f"{stem}Model")]}
        for stem in BASE_DECODERS.split()
    },
    "Gemma3TextModel": {**_GEMMA3, "use_bidirectional_attention": True},
    "Gemma3TextForSequenceClassification": _GEMMA3,
    "CohereCompassTextForSequenceClassification": {
        **_FEW,
        **ARCHITECTURES["CohereCompassForCausalLM"],
    },
    "ModernBertDecoderForSequenceClassification": {
        **_FEW,
        **ARCHITECTURES["ModernBertDecoderForCausalLM"],
        "num_labels": 3,
        "classifier_bias": True,
    },
}
MEANS = ("MPNet", "Deberta", "T5", "MT5", "UMT5", "Nomic", "Jina", "EuroBert", "Gemma3Text")
MEANS += ("EmbeddingGemma2", "Esm")


def made(architecture: str, **changes: Any) -> Path:
    """The folder of a tiny checkpoint, made once a session."""
    settings = {**SHAPE, **(ENCODERS | HEADS).get(architecture, {}), **changes}
    return cached_tiny(architecture, **settings)


@lru_cache(maxsize=4)
def oracle(folder: Path) -> Any:
    """The Hugging Face model of a folder."""
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def expected(folder: Path, ids: Sequence[int], second: int = 0) -> list[float]:
    """The embedding or the scores of one text; `second`: where a second text begins."""
    model = oracle(folder)
    extra = {}
    if second:
        extra["token_type_ids"] = torch.tensor([[0] * second + [1] * (len(ids) - second)])
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)]), **extra)
    if "logits" in out:
        return [float(x) for x in out.logits[0]]
    hidden: Tensor = out.last_hidden_state[0]
    name = type(model).__name__
    if name.startswith(MEANS):
        vector = hidden.mean(0)
    else:
        vector = hidden[0] if name in ENCODERS else hidden[-1]
    return [float(x) for x in F.normalize(vector, dim=0)]
