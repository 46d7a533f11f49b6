"""Config defaults of encoders; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BERT: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True,
    "is_decoder": False,
}  # fmt: skip
_ROBERTA = _BERT | {
    "vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"architecture": "BertModel", **_BERT},
    "roberta": {"architecture": "RobertaModel", **_ROBERTA},
    "xlm-roberta": {"architecture": "XLMRobertaModel", **_ROBERTA, "vocab_size": 30522},
    "camembert": {"architecture": "CamembertModel", **_ROBERTA, "vocab_size": 30522},
    "ernie": {"architecture": "ErnieModel", **_BERT, "use_task_id": False},
    "data2vec-text": {"architecture": "Data2VecTextModel", **_ROBERTA, "vocab_size": 30522},
    "megatron-bert": {
        "architecture": "MegatronBertModel", **_BERT, "vocab_size": 29056, "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "roberta-prelayernorm": {"architecture": "RobertaPreLayerNormModel", **_ROBERTA},
    "rembert": {
        "architecture": "RemBertModel", **_BERT, "vocab_size": 250300, "hidden_size": 1152,
        "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608,
        "input_embedding_size": 256, "bos_token_id": 312, "eos_token_id": 313,
        "tie_word_embeddings": False,
    },
    "xlm-roberta-xl": {
        "architecture": "XLMRobertaXLModel", **_ROBERTA, "vocab_size": 250880, "hidden_size": 2560,
        "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 10240,
        "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-05,
    },
    "electra": {
        "architecture": "ElectraModel", **_BERT, "embedding_size": 128, "hidden_size": 256,
        "num_attention_heads": 4, "intermediate_size": 1024,
    },
    "distilbert": {
        "architecture": "DistilBertModel", "vocab_size": 30522, "hidden_size": 768,
        "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072,
        "activation": "gelu", "max_position_embeddings": 512, "pad_token_id": 0,
        "tie_word_embeddings": True, "sinusoidal_pos_embds": False,
    },
    "albert": {
        "architecture": "AlbertModel", **_BERT, "vocab_size": 30000, "embedding_size": 128,
        "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384,
        "hidden_act": "gelu_new", "num_hidden_groups": 1, "inner_group_num": 1,
        "bos_token_id": 2, "eos_token_id": 3,
    },
    "mpnet": {
        "architecture": "MPNetModel", "vocab_size": 30527, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
        "relative_attention_num_buckets": 32, "pad_token_id": 1, "bos_token_id": 0,
        "eos_token_id": 2, "tie_word_embeddings": True,
    },
    "t5": {
        "architecture": "T5EncoderModel", "vocab_size": 32128, "hidden_size": 512,
        "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8, "d_kv": 64,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-06, "feed_forward_proj": "relu", "max_position_embeddings": 512,
        "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True,
    },
    "modernbert": {
        "architecture": "ModernBertModel", "vocab_size": 50368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
        "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-05,
        "norm_bias": False, "pad_token_id": 50283, "eos_token_id": 50282, "bos_token_id": 50281,
        "local_attention": 128, "classifier_pooling": "cls", "classifier_bias": False,
        "classifier_activation": "gelu", "tie_word_embeddings": True,
        "rope_theta_by_type": {"full_attention": 160000.0, "sliding_attention": 10000.0},
    },
    "nomic_bert": {
        "architecture": "NomicBertModel", **_BERT, "vocab_size": 30528, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rope_theta": 1000.0,
    },
    "gte": {
        "architecture": "GteModel", **_BERT, "vocab_size": 250048, "type_vocab_size": 1,
        "max_position_embeddings": 8192, "pad_token_id": 1, "rope_theta": 160000.0,
    },
    "new": {
        "architecture": "NewModel", **_BERT, "vocab_size": 30528, "type_vocab_size": 0,
        "max_position_embeddings": 2048,
    },
    "jina_embeddings_v3": {
        "architecture": "JinaEmbeddingsV3Model", **_BERT, "vocab_size": 250002, "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-05,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "rope_theta": 20000.0,
    },
    "clip_text_model": {
        "architecture": "CLIPModel", "vocab_size": 49408, "hidden_size": 512,
        "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
        "hidden_act": "quick_gelu", "max_position_embeddings": 77, "layer_norm_eps": 1e-05,
        "projection_dim": 512, "pad_token_id": 1, "bos_token_id": 49406, "eos_token_id": 49407,
    },
    "deberta-v2": {
        "architecture": "DebertaV2Model", "vocab_size": 128100, "hidden_size": 1536,
        "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144,
        "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 0,
        "layer_norm_eps": 1e-07, "relative_attention": False, "max_relative_positions": -1,
        "pad_token_id": 0, "position_biased_input": True, "pooler_hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "eurobert": {
        "architecture": "EuroBertModel", "vocab_size": 128256, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "pad_token_id": 128001,
        "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 250000.0,
        "classifier_pooling": "late",
    },
}
# fmt: on
