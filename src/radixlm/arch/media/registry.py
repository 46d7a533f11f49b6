"""The multimodal architectures: one row each, beside those of the text models in
``arch/registry.py``."""

from collections.abc import Mapping

from radixlm.arch.media.config_json import Raw, architecture_of, flattened
from radixlm.arch.media.layout import CheckpointLayout
from radixlm.arch.media.spec import MultimodalSpec
from radixlm.base.lazy import load
from radixlm.base.record import replace

# architecture of config.json -> its record. PLAIN: the features of its Hugging Face encoder replace
# the embeddings of placeholder tokens, and nothing else is special.
PLAIN = MultimodalSpec()
_QWEN2 = MultimodalSpec(mrope=(16, 24, 24))
_QWEN3 = MultimodalSpec(mrope=(24, 20, 20), mrope_is_interleaved=True)
_QWEN3_5 = MultimodalSpec(mrope=(11, 11, 10), mrope_is_interleaved=True)
_GLM = MultimodalSpec(mrope=(8, 12, 12))
_MOONDREAM = MultimodalSpec(
    text="moondream:moondream",
    video="none",
    single_image=True,
    bidirectional="start",
    custom="moondream",
    layout="moondream:LAYOUT",
)
_OVIS = MultimodalSpec(video="none", custom="ovis", layout="ovis:LAYOUT")
_NVLM = MultimodalSpec(video="none", custom="nvlm", layout="internvl:NVLM")
_NEMOTRON_OMNI = MultimodalSpec(hf_model_type="nemotron_h_omni", audio_processor="parakeet")
_OWN_HEAD = "media.composite:own_head"
_BLIP = MultimodalSpec(text=_OWN_HEAD, single_image=True, image_first=True)
_GRANITE_SPEECH = MultimodalSpec(
    text="media.composite:unscaled_logits",
    audio_processor="granite",
    instruction="can you transcribe the speech into a written format?",
    reader="embedding_multiplier",
)
MULTIMODAL: Mapping[str, MultimodalSpec] = {
    "Apertus1p5ForConditionalGeneration": PLAIN,
    "AriaForConditionalGeneration": PLAIN,
    "AudioFlamingo3ForConditionalGeneration": MultimodalSpec(
        text=_OWN_HEAD,
        audio_processor="single",
        instruction="Transcribe the input speech.",
    ),
    "AyaVisionForConditionalGeneration": MultimodalSpec(text="media.composite:unscaled_logits"),
    "BeeForConditionalGeneration": MultimodalSpec(video="none", layout="llava:BEE"),
    "Blip2ForConditionalGeneration": _BLIP,
    "ChameleonForConditionalGeneration": MultimodalSpec(text="chameleon:chameleon"),
    "CLIPModel": MultimodalSpec(text="bert:clip", encoder="embedding", reader="nothing"),
    "Cohere2VisionForConditionalGeneration": MultimodalSpec(text="media.composite:unscaled_logits"),
    "CohereCompassForConditionalGeneration": MultimodalSpec(text="media.composite:cohere_compass"),
    "Cosmos3EdgeForConditionalGeneration": MultimodalSpec(text="media.composite:cosmos3_edge"),
    "DeepseekOcr2ForConditionalGeneration": MultimodalSpec(text="deepseek_ocr:deepseek_ocr"),
    "DeepseekOCR2ForCausalLM": MultimodalSpec(
        text="deepseek_ocr:deepseek_ocr",
        text_model_type="deepseek:ocr_text_model_type",
        layout="deepseek:OCR2",
    ),
    "DeepseekOCRForCausalLM": MultimodalSpec(
        text="deepseek_ocr:deepseek_ocr",
        text_model_type="deepseek:ocr_text_model_type",
        layout="deepseek:OCR",
    ),
    "DeepseekVL2ForCausalLM": MultimodalSpec(
        text_model_type="deepseek:vl2_text_model_type", custom="deepseek", layout="deepseek:VL2"
    ),
    "DeepseekVLForConditionalGeneration": PLAIN,
    "DeepseekVLHybridForConditionalGeneration": PLAIN,
    "DeepseekVLV2ForCausalLM": MultimodalSpec(
        text_model_type="deepseek:vl2_text_model_type", custom="deepseek", layout="deepseek:VL2"
    ),
    "Dots3NoteForConditionalGeneration": PLAIN,
    "DotsOCRForCausalLM": MultimodalSpec(video="none", custom="dots", layout="dots:LAYOUT"),
    "DotsVLMForCausalLM": MultimodalSpec(video="none", custom="dots", layout="dots:LAYOUT"),
    "Eagle2_5_VLForConditionalGeneration": MultimodalSpec(video="none", layout="internvl:EAGLE"),
    "Emu3ForConditionalGeneration": PLAIN,
    "Ernie4_5_VL_MoeForConditionalGeneration": MultimodalSpec(text="ernie:ernie_vl", video="none"),
    "Ernie4_5_VLMoeForConditionalGeneration": MultimodalSpec(text="ernie:ernie_vl", video="none"),
    "Exaone4_5_ForConditionalGeneration": PLAIN,
    "FastVlmForConditionalGeneration": PLAIN,
    "FuyuForCausalLM": MultimodalSpec(single_image=True, image_first=True),
    "Gemma3ForConditionalGeneration": MultimodalSpec(
        text="media.composite:uncapped_logits", bidirectional="image"
    ),
    "Gemma3nForConditionalGeneration": MultimodalSpec(encoder="class_forward"),
    "Gemma4ForConditionalGeneration": MultimodalSpec(reader="gemma4"),
    "Gemma4UnifiedForConditionalGeneration": MultimodalSpec(reader="gemma4_unified"),
    "Glm46VForConditionalGeneration": _GLM,
    "GLM4VForCausalLM": MultimodalSpec(
        text="custom:glm4v",
        video="none",
        single_image=True,
        has_one_position=True,
        custom="glm4v",
        layout="glm4v:LAYOUT",
    ),
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Glm5NextForConditionalGeneration": PLAIN,
    "GlmAsrForConditionalGeneration": MultimodalSpec(
        audio_processor="single", instruction="Please transcribe this audio into text"
    ),
    "GlmOcrForConditionalGeneration": _GLM,
    "GotOcr2ForConditionalGeneration": PLAIN,
    "Granite4VisionForConditionalGeneration": MultimodalSpec(
        text="media.composite:granite4_vision"
    ),
    "GraniteDoclingForConditionalGeneration": MultimodalSpec(
        reader="embedding_multiplier", embed_scale=12.0
    ),
    "GraniteSpeechForConditionalGeneration": _GRANITE_SPEECH,
    "GraniteSpeechPlusForConditionalGeneration": _GRANITE_SPEECH,
    "H2OVLChatModel": MultimodalSpec(video="none", custom="h2o", layout="internvl:INTERNVL"),
    "HfMoondream": _MOONDREAM,
    "HunYuanVLForConditionalGeneration": MultimodalSpec(rope_by_image_index=True),
    "HYV4VLForConditionalGeneration": MultimodalSpec(
        text="media.composite:hy_v4_vl", has_row_ends=True
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": MultimodalSpec(reader="embedding_multiplier"),
    "Idefics2ForConditionalGeneration": PLAIN,
    "Idefics3ForConditionalGeneration": PLAIN,
    "Inkling2ForConditionalGeneration": PLAIN,
    "Inkling2LoopForConditionalGeneration": PLAIN,
    "InklingForConditionalGeneration": MultimodalSpec(text="conv_attention:inkling"),
    "InstructBlipForConditionalGeneration": _BLIP,
    "InternS1ForConditionalGeneration": MultimodalSpec(layout="internvl:INTERN_S1"),
    "InternS2PreviewForConditionalGeneration": replace(_QWEN3_5, hf_model_type="qwen3_5_moe"),
    "InternVLChatModel": MultimodalSpec(layout="internvl:INTERNVL"),
    "InternVLForConditionalGeneration": MultimodalSpec(video="images"),
    "JanusForConditionalGeneration": PLAIN,
    "JetVLMForConditionalGeneration": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="JetNemotronForCausalLM",
        video="none",
        custom="vila",
        layout="vila:LAYOUT",
    ),
    "KeyeForConditionalGeneration": replace(
        _QWEN2, text_model_type="keye:text_model_type", video="none", layout="keye:KEYE"
    ),
    "KeyeVL1_5ForConditionalGeneration": replace(
        _QWEN2, text_model_type="keye:text_model_type", video="none", layout="keye:KEYE_1_5"
    ),
    "Kimi_K25ForConditionalGeneration": PLAIN,
    "KimiK25ForConditionalGeneration": PLAIN,
    "KimiVLForConditionalGeneration": MultimodalSpec(custom="kimi", layout="kimi:LAYOUT"),
    "Lfm2VlForConditionalGeneration": PLAIN,
    "Lfm3VlForConditionalGeneration": PLAIN,
    "LightOnOCRForConditionalGeneration": PLAIN,
    "LightOnOcrForConditionalGeneration": PLAIN,
    "Llama4ForConditionalGeneration": MultimodalSpec(text="llama4:llama4", encoder="class_forward"),
    "LlavaForConditionalGeneration": PLAIN,
    "LlavaLlamaForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="LlamaForCausalLM",
        layout="llava:LLAVA",
    ),
    "LlavaMistralForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="MistralForCausalLM",
        layout="llava:LLAVA",
    ),
    "LlavaNextForConditionalGeneration": PLAIN,
    "LlavaNextVideoForConditionalGeneration": PLAIN,
    "LlavaOnevisionForConditionalGeneration": PLAIN,
    "LlavaQwenForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="Qwen2ForCausalLM",
        layout="llava:LLAVA",
    ),
    "LlavaVidForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="LlamaForCausalLM",
        video="processor",
        layout="llava:LLAVA_VIDEO",
    ),
    "LocateAnythingForConditionalGeneration": MultimodalSpec(
        video="none", custom="locate_anything", layout="kimi:LOCATE_ANYTHING"
    ),
    "MantisForConditionalGeneration": MultimodalSpec(
        video="none", custom="mantis", hf_model_type="llava"
    ),
    "MiDashengLMModel": MultimodalSpec(
        video="none",
        custom="dasheng",
        layout="midasheng:LAYOUT",
        audio_processor="dasheng",
        instruction="Transcribe the audio into text.",
    ),
    "MiniCPMO": MultimodalSpec(
        text_model_type="minicpm:text_model_type", custom="minicpm", layout="minicpm:LAYOUT"
    ),
    "MiniCPMOcrForConditionalGeneration": PLAIN,
    "MiniCPMV": MultimodalSpec(
        text_model_type="minicpm:text_model_type", custom="minicpm", layout="minicpm:LAYOUT"
    ),
    "MiniCPMV4_6ForConditionalGeneration": PLAIN,
    "MiniCPMV4_7ForConditionalGeneration": MultimodalSpec(reader="canvas"),
    "MiniMaxM3SparseForConditionalGeneration": PLAIN,
    "Mistral3ForConditionalGeneration": PLAIN,
    "MistralLarge4ForConditionalGeneration": PLAIN,
    "MllamaForConditionalGeneration": MultimodalSpec(
        text="mllama:mllama", encoder="cross_attention"
    ),
    "Molmo2ForConditionalGeneration": MultimodalSpec(
        text="molmo:molmo",
        video="none",
        single_image=True,
        bidirectional="image",
        adds_to_embeddings=True,
        needs_token_ids=True,
    ),
    "MolmoForCausalLM": MultimodalSpec(
        text="molmo:molmo",
        video="none",
        adds_to_embeddings=True,
        needs_token_ids=True,
        custom="molmo",
        layout="molmo:LAYOUT",
    ),
    "Moondream3ForCausalLM": _MOONDREAM,
    "MossTranscribeDiarizeForConditionalGeneration": MultimodalSpec(
        instruction="Transcribe the speech."
    ),
    "MultiModalityCausalLM": MultimodalSpec(layout="janus:LAYOUT"),
    "MuseGlimmerForConditionalGeneration": MultimodalSpec(
        text="media.composite:untied_head", text_architecture="MuseGlimmerForCausalLM"
    ),
    "MuseSparkForConditionalGeneration": MultimodalSpec(
        text="media.composite:untied_head", text_architecture="MuseSparkForCausalLM"
    ),
    "MusicFlamingoForConditionalGeneration": MultimodalSpec(
        text=_OWN_HEAD,
        encoder="class_forward",
        audio_processor="enclosed",
        instruction="Transcribe the input speech.",
    ),
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON_OMNI,
    "NemotronH_Nano_VL_V2": MultimodalSpec(
        video="none", custom="nemotron", layout="nemotron:LAYOUT"
    ),
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON_OMNI,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON_OMNI,
    "NVILALiteForConditionalGeneration": MultimodalSpec(
        video="none", custom="vila", layout="vila:LAYOUT"
    ),
    "NVLM_D": _NVLM,
    "NVLM_D_Model": _NVLM,
    "OpenCUAForConditionalGeneration": MultimodalSpec(video="none", layout="qwen:OPENCUA"),
    "Ovis": MultimodalSpec(video="none", custom="ovis_tiles", layout="ovis:TILES"),
    "Ovis2_5": _OVIS,
    "Ovis2_6_MoeForCausalLM": _OVIS,
    "Ovis2_6ForCausalLM": _OVIS,
    "Ovis2ForConditionalGeneration": MultimodalSpec(encoder="class_forward"),
    "PaddleOCRVLForConditionalGeneration": _QWEN2,
    "PaliGemmaForConditionalGeneration": MultimodalSpec(
        text="media.composite:paligemma", bidirectional="prompt"
    ),
    "PerceptionLMForConditionalGeneration": PLAIN,
    "Phi3VForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="Phi3ForCausalLM",
        text_model_type="phi3:text_model_type",
        video="none",
        custom="phi3",
        layout="phi3:LAYOUT",
    ),
    "Phi4MMForCausalLM": MultimodalSpec(
        text="media.composite:phi4_multimodal",
        encoder="class_forward",
        layout="phi4:LAYOUT",
        reader="phi4",
    ),
    "Phi4MultimodalForCausalLM": MultimodalSpec(
        text="media.composite:phi4_multimodal", encoder="class_forward", reader="phi4"
    ),
    "PixtralForConditionalGeneration": MultimodalSpec(video="none", layout="pixtral:LAYOUT"),
    "POINTSV15ChatModel": MultimodalSpec(
        text_model_type="qwen:points_text", video="none", layout="qwen:POINTS"
    ),
    "QianfanOCRForConditionalGeneration": PLAIN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen2_5OmniForConditionalGeneration": replace(_QWEN2, video="none", layout="qwen:OMNI"),
    "Qwen2_5OmniModel": replace(_QWEN2, video="none", layout="qwen:OMNI"),
    "Qwen2_5OmniThinkerForConditionalGeneration": replace(_QWEN2, video="none"),
    "Qwen2AudioForConditionalGeneration": MultimodalSpec(text=_OWN_HEAD, encoder="class_forward"),
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen3ASRForConditionalGeneration": MultimodalSpec(
        layout="qwen:ASR", audio_processor="single", transcriber="tagged"
    ),
    "Qwen3OmniMoeForConditionalGeneration": replace(_QWEN3, video="none", layout="qwen:OMNI"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": replace(_QWEN3, video="none"),
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen4ExpForConditionalGeneration": MultimodalSpec(
        text="media.composite:qwen4_exp",
        text_architecture="Qwen4ExpForCausalLM",
        needs_token_ids=True,
    ),
    "RForConditionalGeneration": MultimodalSpec(video="none", layout="llava:R_4B"),
    "Sarashina2VisionForCausalLM": MultimodalSpec(video="none", layout="qwen:SARASHINA"),
    "Siglip2Model": MultimodalSpec(text="bert:siglip", encoder="embedding", reader="nothing"),
    "SiglipModel": MultimodalSpec(text="bert:siglip", encoder="embedding", reader="nothing"),
    "SkyworkR1VChatModel": MultimodalSpec(layout="internvl:INTERNVL"),
    "SmolVLMForConditionalGeneration": MultimodalSpec(video="images"),
    "Step3p7ForConditionalGeneration": MultimodalSpec(
        text="media.composite:untied_head",
        text_architecture="Step3p5ForCausalLM",
        layout="step:LAYOUT",
    ),
    "StepVLForConditionalGeneration": MultimodalSpec(
        text_model_type="step:text_model_type", layout="step:LAYOUT"
    ),
    "Tarsier2ForConditionalGeneration": replace(_QWEN2, video="none", layout="qwen:TARSIER2"),
    "TarsierForConditionalGeneration": MultimodalSpec(
        video="none", custom="tarsier", hf_model_type="llava"
    ),
    "VibeVoiceAsrForConditionalGeneration": MultimodalSpec(
        instruction="Please transcribe the audio."
    ),
    "VideoLlama3ForConditionalGeneration": PLAIN,
    "VideoLlavaForConditionalGeneration": PLAIN,
    "VILAForConditionalGeneration": MultimodalSpec(
        video="none", custom="vila", layout="vila:LAYOUT"
    ),
    "VipLlavaForConditionalGeneration": PLAIN,
    "VoxtralForConditionalGeneration": MultimodalSpec(
        text=_OWN_HEAD, audio_processor="voxtral", transcriber="marked"
    ),
    "WhisperForConditionalGeneration": MultimodalSpec(
        text="whisper:whisper",
        encoder="encoder_decoder",
        audio_processor="whisper",
        transcriber="tokens",
        reader="decoder_start",
    ),
    "YiVLForCausalLM": MultimodalSpec(
        text="media.composite:text_keys_at_the_top",
        text_architecture="LlamaForCausalLM",
        layout="llava:YI_VL",
    ),
}


def multimodal_spec(architecture: str, raw: Raw) -> MultimodalSpec | None:
    """The record of a checkpoint, filled in from its config.json; None for a text model."""
    row = MULTIMODAL.get(architecture)
    if row is None:
        return None
    read = load(f"radixlm.arch.media.from_config:{row.reader}")
    spec: MultimodalSpec = read(row, flattened(raw))
    return spec


def row_of(raw: Raw) -> MultimodalSpec | None:
    """The row of the architecture that config.json names; None for a text model."""
    return MULTIMODAL.get(architecture_of(raw))


def layout_of(row: MultimodalSpec | None) -> CheckpointLayout | None:
    """The layout of a model's checkpoints; None where they are those of the Hugging Face class."""
    if row is None or not row.layout:
        return None
    layout: CheckpointLayout = load(f"radixlm.arch.media.layouts.{row.layout}")
    return layout


def encoder_names(architecture: str) -> str:
    """Pattern of the tensors that a layout's rules give to encoders; "" where there are none."""
    layout = layout_of(MULTIMODAL.get(architecture))
    return "|".join(pattern for pattern, _ in layout.names) if layout is not None else ""


def text_model_type(architecture: str, raw: Raw) -> str:
    """The model_type of the text model where config.json names another or none; "" elsewhere."""
    row = MULTIMODAL.get(architecture)
    if row is None or not row.text_model_type:
        return ""
    return str(load(f"radixlm.arch.media.layouts.{row.text_model_type}")(raw))
