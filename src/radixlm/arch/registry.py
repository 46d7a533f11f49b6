"""Architecture name of a config.json -> the function that describes it.

A row is "Name": "module:function" of a module in ``arch/families``, which is imported when the name
is asked for. Embedding and classification models of a decoder or an encoder need no row: their
names follow from the stems at the end.
"""

import difflib
from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.media.registry import MULTIMODAL
from radixlm.arch.spec import Decoder
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import load

Family = Callable[[Config], Decoder]

ARCHITECTURES: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe:afmoe",
    "Apertus1p5TextForCausalLM": "llama4:apertus",
    "ApertusForCausalLM": "llama4:apertus",
    "ApertusForTokenClassification": "heads:token_classifier",
    "AquilaForCausalLM": "llama:llama",
    "AquilaModel": "llama:llama",
    "ArceeForCausalLM": "llama:arcee",
    "ArcticForCausalLM": "own_code:arctic",
    "AriaTextForCausalLM": "moe:aria",
    "AXK1ForCausalLM": "deepseek:axk1",
    "AXK2ForCausalLM": "mla:axk2",
    "BaiChuanForCausalLM": "custom:baichuan",
    "BaichuanForCausalLM": "custom:baichuan",
    "BailingHybridForCausalLM": "mla:bailing_hybrid",
    "BailingMoEForCausalLM": "custom:bailing_moe",
    "BailingMoeForCausalLM": "custom:bailing_moe",
    "BailingMoeV2_5ForCausalLM": "own_code:bailing_moe_v2_5",
    "BailingMoeV2ForCausalLM": "custom:bailing_moe_v2",
    "BailingMoeV3ForCausalLM": "mla:bailing_moe_v3",
    "BambaForCausalLM": "hybrid:bamba",
    "BeamForCausalLM": "moe:beam",
    "BeamForTokenClassification": "heads:token_classifier",
    "BertLMHeadModel": "bert_decoders:bert_decoder",
    "BioGptForCausalLM": "gptj:biogpt",
    "BitNetForCausalLM": "llama4:bitnet",
    "BloomForCausalLM": "alibi:bloom",
    "CamembertForCausalLM": "bert_decoders:roberta",
    "ChatGLMForConditionalGeneration": "custom:chatglm",
    "ChatGLMModel": "custom:chatglm",
    "CLIPTextModelWithProjection": "bert:clip",
    "CodeGenForCausalLM": "gptj:codegen",
    "Cohere2ForCausalLM": "cohere:cohere2",
    "Cohere2MoeForCausalLM": "cohere:cohere2_moe",
    "CohereCompassForCausalLM": "cohere:cohere_compass",
    "CohereCompassTextForSequenceClassification": "heads:cohere_compass_classifier",
    "CohereForCausalLM": "cohere:cohere",
    "Contriever": "bert:contriever",
    "CTRLForSequenceClassification": "heads:ctrl_classifier",
    "CTRLLMHeadModel": "ctrl_doge_jetmoe:ctrl",
    "CwmForCausalLM": "llama:cwm",
    "Data2VecTextForCausalLM": "bert_decoders:data2vec",
    "DbrxForCausalLM": "moe:dbrx",
    "DeciLMForCausalLM": "published:decilm",
    "DeepseekForCausalLM": "deepseek:deepseek",
    "DeepseekV2ForCausalLM": "deepseek:deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek:deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek:deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4:deepseek_v4",
    "DiffLlamaForCausalLM": "llama:diff_llama",
    "DogeForCausalLM": "ctrl_doge_jetmoe:doge",
    "Dots1ForCausalLM": "deepseek:dots1",
    "Dots3NoteForCausalLM": "sparse_attention:dots3_note",
    "EmbeddingGemma2Model": "heads:embedding_gemma2",
    "EmbeddingGemma2TextModel": "heads:embedding_gemma2",
    "EmbeddingGemmaModel": "heads:gemma3_text",
    "Emu3ForCausalLM": "llama:llama",
    "Ernie4_5_ForCausalLM": "ernie:ernie",
    "Ernie4_5_MoEForCausalLM": "ernie:ernie_moe",
    "Ernie4_5_MoeForCausalLM": "ernie:ernie_moe",
    "Ernie4_5ForCausalLM": "ernie:ernie",
    "ErnieForCausalLM": "bert_decoders:ernie",
    "Exaone4ForCausalLM": "olmo:exaone4",
    "ExaoneForCausalLM": "custom:exaone",
    "ExaoneMoEForCausalLM": "olmo:exaone_moe",
    "ExaoneMoeForCausalLM": "olmo:exaone_moe",
    "FalconForCausalLM": "gpt:falcon",
    "FalconH1ForCausalLM": "hybrid:falcon_h1",
    "FalconMambaForCausalLM": "hybrid:mamba",
    "FlexOlmoForCausalLM": "olmo:flex_olmo",
    "FlintForCausalLM": "moe:flint",
    "Gemma2ForCausalLM": "gemma:gemma2",
    "Gemma3ForCausalLM": "gemma:gemma3",
    "Gemma3ForSequenceClassification": "heads:gemma3_classifier",
    "Gemma3nForCausalLM": "gemma:gemma3n",
    "Gemma3TextForSequenceClassification": "heads:gemma3_classifier",
    "Gemma3TextModel": "heads:gemma3_text",
    "Gemma4ForCausalLM": "gemma:gemma4",
    "Gemma4UnifiedForCausalLM": "gemma:gemma4_unified",
    "GemmaForCausalLM": "gemma:gemma",
    "Glm4ForCausalLM": "glm:glm4",
    "Glm4MoeForCausalLM": "glm:glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm:glm4_moe_lite",
    "Glm5NextForCausalLM": "deepseek_v4:glm5_next",
    "GlmForCausalLM": "glm:glm",
    "GlmMoeDsaForCausalLM": "deepseek:glm_moe_dsa",
    "GPT2LMHeadModel": "gpt:gpt2",
    "GPTBigCodeForCausalLM": "gptj:gpt_bigcode",
    "GPTJForCausalLM": "gptj:gptj",
    "GPTNeoForCausalLM": "gptj:gpt_neo",
    "GPTNeoXForCausalLM": "gpt:gpt_neox",
    "GPTNeoXJapaneseForCausalLM": "gptj:gpt_neox_japanese",
    "GptOssForCausalLM": "gpt:gpt_oss",
    "GraniteForCausalLM": "granite:granite",
    "GraniteMoeForCausalLM": "granite:granite_moe",
    "GraniteMoeHybridForCausalLM": "hybrid:granite_hybrid",
    "GraniteMoeSharedForCausalLM": "granite:granite_moe_shared",
    "GraniteMoeSWAForCausalLM": "granite:granite_moe_swa",
    "GraniteSWAForCausalLM": "granite:granite_swa",
    "Grok1ForCausalLM": "published:grok1",
    "Grok1ModelForCausalLM": "published:grok1",
    "HeliumForCausalLM": "llama:helium",
    "HF_ColBERT": "bert:colbert",
    "HrmTextForCausalLM": "hrm:hrm_text",
    "HunYuanDenseV1ForCausalLM": "llama4:hunyuan_dense",
    "HunYuanMoEV1ForCausalLM": "llama4:hunyuan_moe",
    "HyperCLOVAXForCausalLM": "granite:hyperclova_x",
    "HYV3ForCausalLM": "moe:hy_v3",
    "HYV4ForCausalLM": "sparse_attention:hy_v4",
    "Inkling2ForCausalLM": "inkling2:inkling2",
    "Inkling2LoopForCausalLM": "inkling2:inkling2_loop",
    "InklingForCausalLM": "conv_attention:inkling",
    "InternLM2ForCausalLM": "custom:internlm2",
    "InternLM2ForRewardModel": "heads:internlm2_reward",
    "InternLM3ForCausalLM": "llama:internlm3",
    "InternLMForCausalLM": "custom:internlm",
    "IQuestCoderForCausalLM": "llama:llama",
    "IQuestLoopCoderForCausalLM": "own_code:iquest_loop_coder",
    "Jais2ForCausalLM": "llama:jais2",
    "JAISLMHeadModel": "own_code:jais",
    "JambaForCausalLM": "hybrid:jamba",
    "JetMoeForCausalLM": "ctrl_doge_jetmoe:jetmoe",
    "JetNemotronForCausalLM": "jet_nemotron:jet_nemotron",
    "JinaEmbeddingsV5Model": "heads:jina_v5",
    "K2HorizonForCausalLM": "k2_spark:k2_horizon",
    "KimiLinearForCausalLM": "linear:kimi_linear",
    "Kolibri1ForCausalLM": "moe:kolibri",
    "LagunaForCausalLM": "moe:laguna",
    "LaraMiniForCausalLM": "linear:lara_mini",
    "Lfm2BidirectionalForMaskedLM": "heads:lfm2_bidirectional",
    "Lfm2BidirectionalModel": "heads:lfm2_bidirectional",
    "Lfm2ForCausalLM": "linear:lfm2",
    "Lfm2MoeForCausalLM": "linear:lfm2_moe",
    "Lfm3ForCausalLM": "linear:lfm3",
    "Llama4ForCausalLM": "llama4:llama4",
    "LlamaBidirectionalForSequenceClassification": "heads:llama_bidirectional_classifier",
    "LlamaBidirectionalModel": "heads:llama_bidirectional",
    "LlamaEmbeddingModel": "heads:embedding",
    "LlamaForCausalLM": "llama:llama",
    "LLaMAForCausalLM": "llama:llama",
    "LlamaForClassification": "heads:llama_classification",
    "LlamaForRewardModel": "heads:llama_reward",
    "LlamaForSequenceClassificationWithNormal_Weights": "heads:llama_weighted",
    "LongcatFlashForCausalLM": "longcat:longcat_flash",
    "Mamba2ForCausalLM": "hybrid:mamba2",
    "MambaForCausalLM": "hybrid:mamba",
    "MegatronBertForCausalLM": "bert_decoders:megatron",
    "MellumForCausalLM": "qwen:mellum",
    "MiMoForCausalLM": "custom:mimo",
    "MiMoV2FlashForCausalLM": "moe:mimo_v2",
    "MiMoV2ForCausalLM": "own_code:mimo_v2",
    "MiniCPM3ForCausalLM": "deepseek:minicpm3",
    "MiniCPMForCausalLM": "custom:minicpm",
    "MiniCPMSALAForCausalLM": "minicpm_sala:minicpm_sala",
    "MiniMaxForCausalLM": "linear:minimax",
    "MiniMaxM1ForCausalLM": "linear:minimax",
    "MiniMaxM2ForCausalLM": "mixtral:minimax_m2",
    "MiniMaxM3SparseForCausalLM": "sparse_attention:minimax_m3",
    "MiniMaxM3VLForCausalLM": "sparse_attention:minimax_m3",
    "MiniMaxText01ForCausalLM": "linear:minimax",
    "Ministral3ForCausalLM": "llama4:ministral3",
    "MinistralForCausalLM": "llama:ministral",
    "Mistral4ForCausalLM": "mla:mistral4",
    "MistralForCausalLM": "llama:mistral",
    "MistralLarge3ForCausalLM": "mla:mistral_large3",
    "MistralLarge4ForCausalLM": "mistral_large4:mistral_large4",
    "MixtralForCausalLM": "mixtral:mixtral",
    "MllamaForCausalLM": "mllama:mllama",
    "ModernBertDecoderForCausalLM": "gpt:modernbert_decoder",
    "ModernBertDecoderForSequenceClassification": "heads:modernbert_decoder_classifier",
    "MotifForCausalLM": "own_code:motif",
    "MPTForCausalLM": "alibi:mpt",
    "MptForCausalLM": "alibi:mpt",
    "MT5EncoderModel": "bert:t5_encoder",
    "MuseGlimmerForCausalLM": "muse:muse_glimmer",
    "MuseSparkForCausalLM": "muse:muse_spark",
    "NanbeigeForCausalLM": "own_code:nanbeige",
    "NanbeigeForSequenceClassification": "heads:classifier",
    "NanoChatForCausalLM": "llama4:nanochat",
    "NemotronForCausalLM": "phi:nemotron",
    "NemotronHForCausalLM": "hybrid:nemotron_h",
    "NemotronHPuzzleForCausalLM": "hybrid:nemotron_h_puzzle",
    "Olmo2ForCausalLM": "olmo:olmo2",
    "Olmo3ForCausalLM": "olmo:olmo3",
    "OlmoeForCausalLM": "olmo:olmoe",
    "OlmoForCausalLM": "olmo:olmo",
    "OlmoHybridForCausalLM": "linear:olmo_hybrid",
    "OpenAIGPTLMHeadModel": "alibi:openai_gpt",
    "OPTForCausalLM": "gpt:opt",
    "OrionForCausalLM": "custom:orion",
    "OuroForCausalLM": "own_code:ouro",
    "PanguEmbeddedForCausalLM": "own_code:pangu_embedded",
    "PanguUltraMoEForCausalLM": "own_code:pangu_ultra_moe",
    "Param2MoEForCausalLM": "own_code:param2_moe",
    "PersimmonForCausalLM": "gptj:persimmon",
    "Phi3ForCausalLM": "phi:phi3",
    "Phi3SmallForCausalLM": "published:phi3_small",
    "PhiForCausalLM": "phi:phi",
    "PhiMoEForCausalLM": "moe:phimoe",
    "PhimoeForCausalLM": "moe:phimoe",
    "Plamo2ForCausalLM": "plamo:plamo2",
    "Plamo3ForCausalLM": "plamo:plamo3",
    "QuantMixtralForCausalLM": "mixtral:mixtral",
    "Qwen2ForCausalLM": "qwen:qwen2",
    "Qwen2ForProcessRewardModel": "heads:qwen2_process_reward",
    "Qwen2ForRewardModel": "heads:qwen2_reward",
    "Qwen2MoeForCausalLM": "qwen:qwen2_moe",
    "Qwen3_5ForCausalLM": "linear:qwen3_5",
    "Qwen3_5ForSequenceClassification": "heads:classifier",
    "Qwen3_5ForTokenClassification": "heads:token_classifier",
    "Qwen3_5MoeForCausalLM": "linear:qwen3_5_moe",
    "Qwen3ForCausalLM": "qwen:qwen3",
    "Qwen3ForRewardModel": "heads:qwen3_reward",
    "Qwen3MoeForCausalLM": "qwen:qwen3_moe",
    "Qwen3NextForCausalLM": "linear:qwen3_next",
    "Qwen4ExpForCausalLM": "qwen4:qwen4_exp",
    "QWenLMHeadModel": "custom:qwen1",
    "RecurrentGemmaForCausalLM": "linear:recurrent_gemma",
    "Rnj1ForCausalLM": "own_code:rnj1",
    "RobertaForCausalLM": "bert_decoders:roberta",
    "RobertaPreLayerNormForCausalLM": "bert_decoders:pre_norm",
    "RWForCausalLM": "own_code:refined_web",
    "RwkvForCausalLM": "rwkv:rwkv",
    "SarvamMLAForCausalLM": "sarvam:sarvam_mla",
    "SarvamMoEForCausalLM": "sarvam:sarvam_moe",
    "SeedOssForCausalLM": "llama:seed_oss",
    "SmolLM3ForCausalLM": "llama:smollm3",
    "SolarForCausalLM": "published:solar",
    "SolarOpenForCausalLM": "glm:solar_open",
    "Spark2_5ForCausalLM": "k2_spark:spark2_5",
    "StableLMEpochForCausalLM": "own_code:stablelm_epoch",
    "StableLmForCausalLM": "phi:stablelm",
    "Starcoder2ForCausalLM": "phi:starcoder2",
    "Step1ForCausalLM": "own_code:step1",
    "Step3p5ForCausalLM": "step:step3p5",
    "Step3TextForCausalLM": "published:step3",
    "Step3VLForConditionalGeneration": "published:step3",
    "T5EncoderModel": "bert:t5_encoder",
    "TeleChat2ForCausalLM": "own_code:telechat2",
    "TeleChat3ForCausalLM": "llama:llama",
    "TeleChatForCausalLM": "own_code:telechat2",
    "TeleFLMForCausalLM": "llama:teleflm",
    "TorchNativeLlamaForCausalLM": "llama:llama",
    "TorchNativePhi3ForCausalLM": "phi:phi3",
    "UMT5EncoderModel": "bert:umt5_encoder",
    "VaultGemmaForCausalLM": "gemma:vault_gemma",
    "VoyageQwen3BidirectionalEmbedModel": "heads:voyage",
    "XGLMForCausalLM": "alibi:xglm",
    "XllmForCausalLM": "k2_spark:k2_horizon",
    "XLMRobertaForCausalLM": "bert_decoders:roberta",
    "XLMRobertaXLForCausalLM": "bert_decoders:roberta_xl",
    "xLSTMForCausalLM": "xlstm:xlstm",
    "XverseForCausalLM": "custom:xverse",
    "XverseMoeForCausalLM": "published:xverse_moe",
    "YoutuForCausalLM": "deepseek:youtu",
    "Zamba2ForCausalLM": "zamba:zamba2",
    "ZambaForCausalLM": "zamba:zamba",
    "ZayaForCausalLM": "conv_attention:zaya",
}
# Models that read images, video or audio: the rows of ``media/registry.py`` name the function too.
ARCHITECTURES |= {name: row.text for name, row in MULTIMODAL.items()}

# <stem>Model gives vectors, <stem>ForSequenceClassification scores, <stem>ForTokenClassification
# scores of each token; all around <stem>ForCausalLM.
DECODERS_WITH_HEADS = """
    Arcee AXK1 AXK2 BioGpt Bloom CTRL DeepseekV2 DeepseekV3 DiffLlama Doge Exaone4 Falcon
    Gemma Gemma2 Glm Glm4 GPT2 GPTBigCode GPTJ GPTNeo GPTNeoX GptOss Helium HunYuanDenseV1
    HunYuanMoEV1 Jamba JetMoe Llama MiniCPM3 MiniMax Ministral Ministral3 Mistral Mistral4
    Mixtral Mpt Nemotron Olmo Olmo2 Olmo3 OpenAIGPT OPT Persimmon Phi Phi3 Phimoe Qwen2
    Qwen2Moe Qwen3 Qwen3_5Text Qwen3Moe Qwen3Next SeedOss SmolLM3 StableLm Starcoder2 Zamba
    Zamba2
"""
# Decoders of which transformers has <stem>Model alone.
BASE_DECODERS = """
    Afmoe Apertus Bamba Beam BitNet CodeGen Cohere Cohere2 Cohere2Moe Cwm DeepseekV32 Dots1
    Ernie4_5 Ernie4_5_Moe ExaoneMoe FalconH1 FalconMamba FlexOlmo Flint Glm4Moe Glm4MoeLite
    GlmMoeDsa GPTNeoXJapanese Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA
    GraniteSWA HYV3 HYV4 HyperCLOVAX Jais2 KimiLinear Kolibri1 Laguna LaraMini Lfm2 Lfm2Moe Lfm3
    LongcatFlash Mamba Mamba2 Mellum MiMoV2Flash MiniMaxM2 NanoChat NemotronH Olmoe OlmoHybrid
    RecurrentGemma Rwkv SolarOpen VaultGemma XGLM xLSTM Youtu Zaya
"""
# Encoders: the rows of ``families/encoders.py``.
_ENCODERS = """
    Albert Bert Camembert Data2VecText DebertaV2 DistilBert Electra Ernie Esm Esmc EuroBert Gte
    GteNew JinaEmbeddingsV3 MegatronBert ModernBert MPNet New NomicBert RemBert Roberta
    RobertaPreLayerNorm RoFormer XLMRoberta XLMRobertaXL
"""
for _stems, _module in ((DECODERS_WITH_HEADS, "heads"), (_ENCODERS, "encoders")):
    for _stem in _stems.split():
        ARCHITECTURES.setdefault(f"{_stem}Model", f"{_module}:embedding")
        ARCHITECTURES.setdefault(f"{_stem}ForSequenceClassification", f"{_module}:classifier")
        ARCHITECTURES.setdefault(f"{_stem}ForTokenClassification", f"{_module}:token_classifier")
        if _module == "encoders":  # how many embedding models are saved; the head is not read
            ARCHITECTURES.setdefault(f"{_stem}ForMaskedLM", f"{_module}:embedding")
ARCHITECTURES |= {f"{_stem}Model": "heads:embedding" for _stem in BASE_DECODERS.split()}

# Drafted tokens with which speculative decoding starts, as in SGLang; 5 for other architectures.
DRAFT_STEPS = {"DeepseekV2ForCausalLM": 3, "DeepseekV3ForCausalLM": 3, "GptOssForCausalLM": 3}
# Checkpoints that hold only a draft model for speculative decoding.
DRAFTS: dict[str, str] = {
    "BailingMoeForCausalLMNextN": "drafts:bailing",
    "DeepseekV3ForCausalLMNextN": "drafts:next_n",
    "DeepseekV4ForCausalLMNextN": "drafts:deepseek_v4",
    "Dots3NoteForCausalLMNextN": "drafts:dots3_note",
    "Ernie4_5_MoeForCausalLMMTP": "drafts:ernie",
    "Gemma4AssistantForCausalLM": "drafts:gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "drafts:gemma4_unified_assistant",
    "Glm4MoeForCausalLMNextN": "drafts:next_n",
    "Glm5NextForConditionalGenerationNextN": "drafts:glm5_next",
    "Glm4MoeLiteForCausalLMNextN": "drafts:next_n",
    "GlmOcrForConditionalGenerationNextN": "drafts:next_n",
    "GlmMoeDsaForCausalLMNextN": "drafts:next_n",
    "LlamaForCausalLMEagle": "eagle:llama_eagle",
    "LlamaForCausalLMEagle3": "eagle:llama_eagle3",
    "Eagle3DraftModel": "eagle:llama_eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle:deepseek_eagle3",
    "Eagle3DeepseekV3ForCausalLM": "eagle:deepseek_eagle3",
    "Eagle3LlamaForCausalLM": "eagle:llama_eagle3",
    "Eagle3MiniMaxM2ForCausalLM": "eagle:llama_eagle3",
    "Eagle3Qwen2_5vlForCausalLM": "eagle:llama_eagle3",
    "Eagle3Qwen3vlForCausalLM": "eagle:llama_eagle3",
    "Eagle3Speculator": "eagle:llama_eagle3",
    "EagleCohereForCausalLM": "eagle:cohere_eagle",
    "EagleLlama4ForCausalLM": "eagle:llama4_eagle",
    "EagleLlamaForCausalLM": "eagle:llama_eagle",
    "EagleMistralForCausalLM": "eagle:mistral_eagle",
    "PEagleDraftModel": "eagle:peagle",
    "PEagleSpeculator": "eagle:peagle",
    "PeagleLlamaForCausalLM": "eagle:peagle",
    "EagleMistralLarge3ForCausalLM": "eagle:mistral_large3_eagle",
    "DFlash2DraftModel": "dflash:dflash2",
    "DFlash2Speculator": "dflash:dflash2",
    "DFlashDraftModel": "dflash:dflash",
    "DFlashLagunaForCausalLM": "dflash:laguna_dflash",
    "DFlashSpeculator": "dflash:dflash",
    "DSparkDraftModel": "dflash:dspark",
    "DeepseekV4ForCausalLMDSpark": "dflash:deepseek_v4_dspark",
    "DSparkMiniMaxDraftModel": "dflash:minimax_dspark",
    "DSparkSpeculator": "dflash:dspark",
    "Lfm2DSparkDraftModel": "dflash:lfm2_dspark",
    "LingDSparkModel": "dflash:dspark",
    "Qwen3DSparkModel": "dflash:dspark",
    "ExaoneMoEForCausalLMMTP": "drafts:exaone_moe",
    "HYV3ForCausalLMNextN": "drafts:bailing",
    "HYV4ForCausalLMNextN": "drafts:hy_v4",
    "LongcatFlashForCausalLMNextN": "drafts:longcat",
    "MLPSpeculatorPreTrainedModel": "draft_heads:mlp_speculator",
    "MedusaModel": "draft_heads:medusa",
    "MiMoMTP": "drafts:mimo",
    "MiMoV2MTP": "drafts:mimo_v2",
    "MiniMaxM3MTP": "drafts:minimax_m3",
    "MistralForCausalLMEagle": "eagle:mistral_eagle",
    "MistralLarge3ForCausalLMEagle": "eagle:mistral_large3_eagle",
    "MtpSpeculator": "drafts:mtp_speculator",
    "NemotronHForCausalLMMTP": "drafts:nemotron_h",
    "Qwen2ForCausalLMEagle": "eagle:qwen2_eagle",
    "Qwen3_5ForCausalLMMTP": "drafts:qwen3_next",
    "Qwen3MoeForCausalLMMTP": "drafts:qwen3_moe",
    "Qwen3NextForCausalLMMTP": "drafts:qwen3_next",
    "Qwen4ExpForCausalLMMTP": "drafts:qwen4_exp",
    "Step3p5MTP": "drafts:step",
}
ARCHITECTURES |= dict.fromkeys(DRAFTS, "drafts:refuse_draft")
# Heads whose authors left the architecture of their model; what they are.
EAGLE_HEADS: dict[str, str] = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle",
    "Qwen2ForCausalLM": "Qwen2ForCausalLMEagle",
}
EAGLE3_HEADS: dict[str, str] = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle3",
    "Qwen3ForCausalLM": "LlamaForCausalLMEagle3",
}
# Models whose checkpoints may hold DSpark layers, and what these are.
DSPARK_LAYERS: dict[str, str] = {"DeepseekV4ForCausalLM": "DeepseekV4ForCausalLMDSpark"}
# Models whose checkpoints hold multi-token-prediction layers beside the decoder's.
MTP_LAYERS: dict[str, str] = {
    "DeepseekV3ForCausalLM": "drafts:next_n",
    "Glm4MoeForCausalLM": "drafts:next_n",
    "Glm4MoeLiteForCausalLM": "drafts:next_n",
    "GlmOcrForConditionalGeneration": "drafts:next_n",
    "DeepseekV32ForCausalLM": "drafts:next_n",
    "DeepseekV4ForCausalLM": "drafts:deepseek_v4",
    "GlmMoeDsaForCausalLM": "drafts:next_n",
    "Glm5NextForCausalLM": "drafts:glm5_next",
    "Glm5NextForConditionalGeneration": "drafts:glm5_next",
    "Dots3NoteForCausalLM": "drafts:dots3_note",
    "Dots3NoteForConditionalGeneration": "drafts:dots3_note",
    "BailingMoeV2ForCausalLM": "drafts:bailing",
    "BailingHybridForCausalLM": "drafts:bailing",
    "BailingMoeV3ForCausalLM": "drafts:bailing",
    "HYV3ForCausalLM": "drafts:bailing",
    "HYV4ForCausalLM": "drafts:hy_v4",
    "Ernie4_5_MoeForCausalLM": "drafts:ernie",
    "Ernie4_5_MoEForCausalLM": "drafts:ernie",
    "ExaoneMoEForCausalLM": "drafts:exaone_moe",
    "ExaoneMoeForCausalLM": "drafts:exaone_moe",
    "Exaone4_5_ForConditionalGeneration": "drafts:exaone_moe",
    "MellumForCausalLM": "drafts:mellum",
    "MiMoForCausalLM": "drafts:mimo",
    "MiniMaxM3VLForCausalLM": "drafts:minimax_m3",
    "MiniMaxM3SparseForCausalLM": "drafts:minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "drafts:minimax_m3",
    "Qwen3MoeForCausalLM": "drafts:qwen3_moe",
    "Qwen3NextForCausalLM": "drafts:qwen3_next",
    "Qwen3_5ForCausalLM": "drafts:qwen3_next",
    "Qwen3_5MoeForCausalLM": "drafts:qwen3_next",
    "Qwen3_5ForConditionalGeneration": "drafts:qwen3_next",
    "Qwen3_5MoeForConditionalGeneration": "drafts:qwen3_next",
    "InternS2PreviewForConditionalGeneration": "drafts:qwen3_next",
    "Qwen4ExpForCausalLM": "drafts:qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "drafts:qwen4_exp",
    "LongcatFlashForCausalLM": "drafts:longcat",
    "MiMoV2FlashForCausalLM": "drafts:mimo_v2",
    "NemotronHForCausalLM": "drafts:nemotron_h",
    "Step3p5ForCausalLM": "drafts:step",
    "Step3p7ForConditionalGeneration": "drafts:step",
}

# Architectures whose checkpoints hold an adapter for each of several tasks (adapters/<task>) ->
# the key of config.json that says which one is merged, and what it is when left out.
TASK_ADAPTERS: dict[str, tuple[str, str]] = {"JinaEmbeddingsV5Model": ("jina_task", "retrieval")}
# Model types for which transformers has a config and runs the class of another model.
BORROWED_CLASSES: dict[str, str] = {
    "sarvam_mla": "SarvamMLAForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
}
# model_type -> the function that gives a published config.json the keys of its Hugging Face class.
CONFIG_CONVERTERS: dict[str, str] = {
    "axk2": "mla:axk2_config",
    "bailing_hybrid": "mla:bailing_config",
    "bailing_moe_v3": "mla:bailing_config",
    "bamba": "hybrid:bamba_config",
    "ernie4_5_vl_moe": "ernie:ernie_vl_config",
    "ernie4_5_vl_moe_text": "ernie:ernie_vl_config",
    "exaone4": "olmo:exaone_config",
    "exaone_moe": "olmo:exaone_config",
    "gpt_neox": "gpt:gpt_neox_config",
    "gpt_neox_japanese": "gpt:gpt_neox_config",
    "hunyuan_v1_moe": "llama4:hunyuan_config",
    "inkling2_loop_text": "inkling2:inkling2_loop_config",
    "inkling2_text": "inkling2:inkling2_config",
    "inkling_text": "conv_attention:inkling_config",
    "jet_nemotron": "jet_nemotron:jet_nemotron_config",
    "kimi_linear": "linear:kimi_linear_config",
    "olmo_hybrid": "linear:olmo_hybrid_config",
    "llama4_text": "llama4:llama4_config",
    "longcat_flash": "longcat:longcat_config",
    "minimax_m2": "mixtral:minimax_m2_config",
    "mistral_large4_text": "mistral_large4:mistral_large4_config",
    "modernbert-decoder": "gpt:modernbert_decoder_config",
    "molmo": "molmo:molmo_config",
    "moondream1": "moondream:moondream_config",
    "moondream3": "moondream:moondream_config",
    "molmo2_text": "molmo:molmo2_config",
    "nemotron_h": "hybrid:nemotron_h_config",
    "nemotron_h_puzzle": "hybrid:nemotron_puzzle_config",
    "paddleocr_vl_text": "ernie:paddleocr_config",
    "rwkv": "rwkv:rwkv_config",
    "sarvam_mla": "sarvam:sarvam_config",
    "sarvam_moe": "sarvam:sarvam_config",
    "step3p5": "step:step_config",
    "step3p7": "step:step_config",
    "zamba2": "zamba:zamba2_config",
    "zaya": "conv_attention:zaya_config",
}


class UnknownArchitecture(CheckpointError):
    """No family describes the checkpoint."""


def find(architecture: str, source: str = "config.json") -> Family:
    """The function that describes ``architecture``; UnknownArchitecture with the nearest names if
    there is none."""
    if architecture in ARCHITECTURES:
        family: Family = family_function(ARCHITECTURES[architecture])
        return family
    near = difflib.get_close_matches(architecture, ARCHITECTURES, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise UnknownArchitecture(
        f"{source}: unknown architecture {architecture!r}{hint}; docs/models.md lists those served"
    )


def predicted(architecture: str) -> str:
    """The model for which a checkpoint of prediction layers was made; the architecture itself if it
    is none."""
    row = DRAFTS.get(architecture)
    targets = [name for name, other in MTP_LAYERS.items() if other == row]
    alike = [name for name in targets if architecture.startswith(name)]
    return (alike or targets or [architecture])[0]


def convert_config(model_type: str, raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with the keys of its Hugging Face class; unchanged where it has them already."""
    converter = CONFIG_CONVERTERS.get(model_type)
    converted: dict[str, Any] = family_function(converter)(raw) if converter else raw
    return converted


def family_function(row: str) -> Any:
    """The function of a row: "module:function" in families/, or "media.module:function"."""
    return load(f"radixlm.arch.{'' if row.startswith('media.') else 'families.'}{row}")
