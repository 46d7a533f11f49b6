"""Which module of this package describes which architectures, so that a start imports one of them.

Each module registers its functions by ``@family`` (``builders.py``) when it is imported; a name has
to be listed here too, or nobody asks for it (`tests/arch/test_registry.py` compares both)."""

from __future__ import annotations

from collections.abc import Mapping

LINEAGES: Mapping[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "alibi": "BloomForCausalLM MPTForCausalLM MptForCausalLM OpenAIGPTLMHeadModel XGLMForCausalLM",
    "cohere": "Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM",
    "composite": """
        AriaForConditionalGeneration AyaVisionForConditionalGeneration
        Blip2ForConditionalGeneration Cohere2VisionForConditionalGeneration
        CohereCompassForConditionalGeneration Cosmos3EdgeForConditionalGeneration
        DeepseekVL2ForCausalLM DeepseekVLForConditionalGeneration
        DeepseekVLHybridForConditionalGeneration DeepseekVLV2ForCausalLM
        Dots3NoteForConditionalGeneration Exaone4_5_ForConditionalGeneration
        FastVlmForConditionalGeneration FuyuForCausalLM Gemma3nForConditionalGeneration
        Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
        Glm46VForConditionalGeneration Glm4vForConditionalGeneration
        Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration
        GlmOcrForConditionalGeneration GotOcr2ForConditionalGeneration
        GraniteDoclingForConditionalGeneration HunYuanVLForConditionalGeneration
        HyperCLOVAXVisionV2ForConditionalGeneration Idefics2ForConditionalGeneration
        Idefics3ForConditionalGeneration InstructBlipForConditionalGeneration
        InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
        JanusForConditionalGeneration KimiK25ForConditionalGeneration
        KimiVLForConditionalGeneration Kimi_K25ForConditionalGeneration
        Lfm2VlForConditionalGeneration Lfm3VlForConditionalGeneration
        LightOnOCRForConditionalGeneration LightOnOcrForConditionalGeneration
        LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration MiniCPMO
        MiniCPMOcrForConditionalGeneration MiniCPMV MiniCPMV4_6ForConditionalGeneration
        MiniCPMV4_7ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
        Mistral3ForConditionalGeneration MultiModalityCausalLM NVILALiteForConditionalGeneration
        Ovis2ForConditionalGeneration PaddleOCRVLForConditionalGeneration
        PaliGemmaForConditionalGeneration PerceptionLMForConditionalGeneration Phi4MMForCausalLM
        Phi4MultimodalForCausalLM QianfanOCRForConditionalGeneration
        Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration
        Qwen2_5OmniThinkerForConditionalGeneration Qwen2_5_VLForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
        SmolVLMForConditionalGeneration VILAForConditionalGeneration
        VideoLlama3ForConditionalGeneration VideoLlavaForConditionalGeneration
        VipLlavaForConditionalGeneration
    """,
    "deepseek_v4": "DeepseekV4ForCausalLM Glm5NextForCausalLM",
    "conv_attention": "InklingForCausalLM InklingForConditionalGeneration ZayaForCausalLM",
    "cross": "MllamaForCausalLM MllamaForConditionalGeneration",
    "custom": """
        BaiChuanForCausalLM BaichuanForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM
        BailingMoeV2ForCausalLM ChatGLMForConditionalGeneration ChatGLMModel ExaoneForCausalLM
        InternLM2ForCausalLM InternLMForCausalLM MiMoForCausalLM MiniCPMForCausalLM
        OrionForCausalLM QWenLMHeadModel XverseForCausalLM
    """,
    "hrm": "HrmTextForCausalLM",
    "deepseek": """
        AXK1ForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
        DeepseekV3ForCausalLM Dots1ForCausalLM GlmMoeDsaForCausalLM MiniCPM3ForCausalLM
        YoutuForCausalLM
    """,
    "drafts": """
        BailingMoeForCausalLMNextN DeepseekV3ForCausalLMNextN Ernie4_5_MoeForCausalLMMTP
        Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLMNextN GlmMoeDsaForCausalLMNextN
        LlamaForCausalLMEagle LlamaForCausalLMEagle3 LongcatFlashForCausalLMNextN MiMoMTP
        MistralForCausalLMEagle Qwen2ForCausalLMEagle Qwen3NextForCausalLMMTP
        Qwen3_5ForCausalLMMTP
    """,
    "early": "CTRLLMHeadModel DogeForCausalLM JetMoeForCausalLM",
    "encoded": "WhisperForConditionalGeneration",
    "encoder": """
        AlbertForSequenceClassification AlbertModel BertForSequenceClassification BertModel
        CLIPModel CLIPTextModelWithProjection CamembertForSequenceClassification CamembertModel
        Contriever DebertaV2ForSequenceClassification DebertaV2Model
        DistilBertForSequenceClassification DistilBertModel ElectraForSequenceClassification
        ElectraModel EuroBertForSequenceClassification EuroBertModel
        GteForSequenceClassification GteModel JinaEmbeddingsV3ForSequenceClassification
        JinaEmbeddingsV3Model MPNetForSequenceClassification MPNetModel
        ModernBertForSequenceClassification ModernBertModel NewForSequenceClassification
        NewModel NomicBertForSequenceClassification NomicBertModel
        RobertaForSequenceClassification RobertaModel T5EncoderModel
        XLMRobertaForSequenceClassification XLMRobertaModel
        XLMRobertaXLForSequenceClassification XLMRobertaXLModel
    """,
    "encoder_kin": """
        Data2VecTextForSequenceClassification Data2VecTextModel ErnieForSequenceClassification
        ErnieModel MegatronBertForSequenceClassification MegatronBertModel
        RemBertForSequenceClassification RemBertModel
        RobertaPreLayerNormForSequenceClassification RobertaPreLayerNormModel
    """,
    "ernie": """
        Ernie4_5ForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoEForCausalLM Ernie4_5_MoeForCausalLM
        Ernie4_5_VLMoeForConditionalGeneration Ernie4_5_VL_MoeForConditionalGeneration
    """,
    "gemma": """
        Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
        Gemma4ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM VaultGemmaForCausalLM
    """,
    "glm": """
        Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM
        SolarOpenForCausalLM
    """,
    "gpt": """
        FalconForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GptOssForCausalLM
        ModernBertDecoderForCausalLM OPTForCausalLM
    """,
    "gptj": """
        BioGptForCausalLM CodeGenForCausalLM GPTBigCodeForCausalLM GPTJForCausalLM
        GPTNeoForCausalLM GPTNeoXJapaneseForCausalLM PersimmonForCausalLM
    """,
    "granite": """
        GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSWAForCausalLM
        GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HyperCLOVAXForCausalLM
    """,
    "heads": """
        AXK1ForSequenceClassification AXK1Model AXK2ForSequenceClassification AXK2Model
        ArceeForSequenceClassification ArceeModel BioGptForSequenceClassification BioGptModel
        BloomForSequenceClassification BloomModel CTRLForSequenceClassification CTRLModel
        CohereCompassTextForSequenceClassification DeepseekV2ForSequenceClassification
        DeepseekV2Model DeepseekV3ForSequenceClassification DeepseekV3Model
        DiffLlamaForSequenceClassification DiffLlamaModel DogeForSequenceClassification
        DogeModel EmbeddingGemma2Model EmbeddingGemma2TextModel EmbeddingGemmaModel
        Exaone4ForSequenceClassification Exaone4Model FalconForSequenceClassification
        FalconModel GPT2ForSequenceClassification GPT2Model GPTBigCodeForSequenceClassification
        GPTBigCodeModel GPTJForSequenceClassification GPTJModel GPTNeoForSequenceClassification
        GPTNeoModel GPTNeoXForSequenceClassification GPTNeoXModel
        Gemma2ForSequenceClassification Gemma2Model Gemma3ForSequenceClassification
        Gemma3TextForSequenceClassification Gemma3TextModel GemmaForSequenceClassification
        GemmaModel Glm4ForSequenceClassification Glm4Model GlmForSequenceClassification GlmModel
        GptOssForSequenceClassification GptOssModel HeliumForSequenceClassification HeliumModel
        HunYuanDenseV1ForSequenceClassification HunYuanDenseV1Model
        HunYuanMoEV1ForSequenceClassification HunYuanMoEV1Model InternLM2ForRewardModel
        JambaForSequenceClassification JambaModel JetMoeForSequenceClassification JetMoeModel
        LlamaBidirectionalModel LlamaEmbeddingModel LlamaForClassification LlamaForRewardModel
        LlamaForSequenceClassification LlamaForSequenceClassificationWithNormal_Weights
        LlamaModel MiniCPM3ForSequenceClassification MiniCPM3Model
        MiniMaxForSequenceClassification MiniMaxModel Ministral3ForSequenceClassification
        Ministral3Model MinistralForSequenceClassification MinistralModel
        Mistral4ForSequenceClassification Mistral4Model MistralForSequenceClassification
        MistralModel MixtralForSequenceClassification MixtralModel
        ModernBertDecoderForSequenceClassification MptForSequenceClassification MptModel
        NemotronForSequenceClassification NemotronModel OPTForSequenceClassification OPTModel
        Olmo2ForSequenceClassification Olmo2Model Olmo3ForSequenceClassification Olmo3Model
        OlmoForSequenceClassification OlmoModel OpenAIGPTForSequenceClassification
        OpenAIGPTModel PersimmonForSequenceClassification PersimmonModel
        Phi3ForSequenceClassification Phi3Model PhiForSequenceClassification PhiModel
        PhimoeForSequenceClassification PhimoeModel Qwen2ForProcessRewardModel
        Qwen2ForRewardModel Qwen2ForSequenceClassification Qwen2Model
        Qwen2MoeForSequenceClassification Qwen2MoeModel Qwen3ForRewardModel
        Qwen3ForSequenceClassification Qwen3Model Qwen3MoeForSequenceClassification
        Qwen3MoeModel Qwen3NextForSequenceClassification Qwen3NextModel
        Qwen3_5ForSequenceClassification Qwen3_5TextForSequenceClassification Qwen3_5TextModel
        SeedOssForSequenceClassification SeedOssModel SmolLM3ForSequenceClassification
        SmolLM3Model StableLmForSequenceClassification StableLmModel
        Starcoder2ForSequenceClassification Starcoder2Model Zamba2ForSequenceClassification
        Zamba2Model ZambaForSequenceClassification ZambaModel
    """,
    "hearing": """
        GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration
        NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3
        Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel Qwen3ASRForConditionalGeneration
        Qwen3OmniMoeForConditionalGeneration VoxtralForConditionalGeneration
    """,
    "hybrid": """
        BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM
        JambaForCausalLM Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM
    """,
    "mla": "AXK2ForCausalLM BailingHybridForCausalLM Mistral4ForCausalLM",
    "linear": """
        KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM
        MiniMaxForCausalLM MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM OlmoHybridForCausalLM
        Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM RecurrentGemmaForCausalLM
    """,
    "llama": """
        ArceeForCausalLM CwmForCausalLM DiffLlamaForCausalLM Emu3ForCausalLM HeliumForCausalLM
        IQuestCoderForCausalLM InternLM3ForCausalLM Jais2ForCausalLM LlamaForCausalLM
        MinistralForCausalLM MistralForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        TeleFLMForCausalLM TorchNativeLlamaForCausalLM
    """,
    "llama4": """
        ApertusForCausalLM BitNetForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
        Llama4ForCausalLM Llama4ForConditionalGeneration Ministral3ForCausalLM
        NanoChatForCausalLM
    """,
    "longcat": "LongcatFlashForCausalLM",
    "media_layouts_llava": """
        LlavaLlamaForCausalLM LlavaMistralForCausalLM LlavaQwenForCausalLM LlavaVidForCausalLM
        YiVLForCausalLM
    """,
    "mixtral": "MiniMaxM2ForCausalLM MixtralForCausalLM QuantMixtralForCausalLM",
    "moe": """
        AriaTextForCausalLM BeamForCausalLM DbrxForCausalLM FlintForCausalLM HYV3ForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM MiMoV2FlashForCausalLM PhiMoEForCausalLM
        PhimoeForCausalLM
    """,
    "muse": """
        MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration MuseSparkForCausalLM
        MuseSparkForConditionalGeneration
    """,
    "olmo": """
        Exaone4ForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM FlexOlmoForCausalLM
        Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    """,
    "phi": """
        NemotronForCausalLM Phi3ForCausalLM PhiForCausalLM StableLmForCausalLM
        Starcoder2ForCausalLM TorchNativePhi3ForCausalLM
    """,
    "published": """
        DeciLMForCausalLM Grok1ForCausalLM Grok1ModelForCausalLM Phi3SmallForCausalLM
        SolarForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration
        XverseMoeForCausalLM
    """,
    "qwen": """
        MellumForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
        Qwen3MoeForCausalLM
    """,
    "qwen4": "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration",
    "rwkv": "RwkvForCausalLM",
    "seeing": """
        ChameleonForConditionalGeneration DeepseekOCRForCausalLM
        DeepseekOcr2ForConditionalGeneration Granite4VisionForConditionalGeneration
        Molmo2ForConditionalGeneration
    """,
    "sparse_attention": """
        Dots3NoteForCausalLM HYV4ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3VLForCausalLM
    """,
    "step": "Step3p5ForCausalLM Step3p7ForConditionalGeneration",
    "xlstm": "xLSTMForCausalLM",
    "zamba": "Zamba2ForCausalLM ZambaForCausalLM",
}
# model types whose published config.json a module brings to the keys of its class
FORMS: Mapping[str, str] = {
    "conv_attention": "inkling_text zaya",
    "ernie": "ernie4_5_vl_moe ernie4_5_vl_moe_text",
    "gpt": "gpt_neox gpt_neox_japanese modernbert-decoder",
    "hybrid": "bamba nemotron_h",
    "mla": "axk2 bailing_hybrid",
    "linear": "kimi_linear",
    "llama4": "hunyuan_v1_moe llama4_text",
    "longcat": "longcat_flash",
    "mixtral": "minimax_m2",
    "olmo": "exaone4 exaone_moe",
    "rwkv": "rwkv",
    "seeing": "molmo2_text",
    "step": "step3p5 step3p7",
    "zamba": "zamba2",
}
