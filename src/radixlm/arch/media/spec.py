"""What is special about a model that reads images, video or audio: one record each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from radixlm.base.record import Record, field

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")
Video = Literal["token", "processor", "images", "none"]
Encoder = Literal["features", "class_forward", "cross_attention", "encoder_decoder", "embedding"]
Bidirectional = Literal["", "image", "start", "prompt"]
Transcriber = Literal["instruct", "tokens", "marked", "tagged"]


class Canvas(Record):
    """Token ids that mark where the crops of an image lie on one plane (MiniCPM-V 4.7)."""

    slice_start: int
    slice_end: int
    image_start: int
    image_end: int
    newline: int
    # rows and columns of patches that make one placeholder
    merge: int

    @property
    def boundary_tokens(self) -> tuple[int, ...]:
        slices = (self.slice_start, self.slice_end)
        return (*slices, self.image_start, self.image_end, self.newline)


class MultimodalSpec(Record):
    """One multimodal architecture: ``registry.py`` gives the fields of the model, and
    ``from_config.py`` those that a checkpoint's config.json decides."""

    # ---- the language model
    # the function that describes it: a row of arch/registry.py
    text: str = "media.composite:composite"
    # architecture of the text model, for functions that do not go by its model_type
    text_architecture: str = ""
    # function in layouts/ that tells the text model's model_type from config.json, "module:name"
    text_model_type: str = ""

    # ---- prompts
    # how a prompt names a video: by a token of config.json, by one that only the processor knows,
    # as a run of images, or not at all
    video: Video = "token"
    # a prompt holds at most one image
    single_image: bool = False
    # the processor puts the image's placeholders before the text
    image_first: bool = False
    # tokens that attend to later ones too: those of each image, those of the only image and of what
    # stands before it, or the whole prompt
    bidirectional: Bidirectional = ""
    # sections of M-RoPE where config.json has none
    mrope: tuple[int, ...] = ()
    # M-RoPE interleaves its sections, whatever config.json says; they may be longer than they need
    mrope_is_interleaved: bool = False
    # M-RoPE counts images in its first section; the text behind an image is not shifted
    rope_by_image_index: bool = False
    # an image has one position in all sections, and its boundary tokens one each
    has_one_position: bool = False
    # each row of an image ends with a placeholder of its own, a column further for M-RoPE; each
    # frame of a video counts on from the one before
    has_row_ends: bool = False

    # ---- encoders
    # what becomes of the encoder's output: "features" replace the embeddings of the placeholders;
    # "class_forward": the same, by rules that stand in the forward of the Hugging Face class;
    # "cross_attention": some layers attend to it (Llama 3.2 Vision); "encoder_decoder": all layers
    # do (Whisper); "embedding": it is the request's vector (CLIP)
    encoder: Encoder = "features"
    # the output is added to the embeddings of the placeholders instead of replacing them; the
    # image's boundary tokens count as placeholders
    adds_to_embeddings: bool = False
    # layers of the language model read the token ids of placeholders
    needs_token_ids: bool = False
    # class in models/encoders/custom.py, for checkpoints that transformers has no class for, and in
    # multimodal/image_processors.py where ``layout`` names no processor
    custom: str = ""
    # CheckpointLayout in layouts/, "module:NAME", for checkpoints whose names are not the class's
    layout: str = ""
    # model_type of the Hugging Face class where config.json says another one
    hf_model_type: str = ""

    # ---- audio
    # class in multimodal/audio_processors.py; "": the Hugging Face processor
    audio_processor: str = ""
    # how /v1/audio/transcriptions asks for a transcript (entrypoints/http/speech/transcribers.py)
    transcriber: Transcriber = "instruct"
    # the words that an "instruct" model was trained to be asked with
    instruction: str = ""

    # ---- read from config.json
    # function in from_config.py that reads the fields below
    reader: str = "placeholders"
    # modality -> id of its placeholder token
    tokens: Mapping[str, int] = field(default_factory=dict)
    # further ids whose embeddings the encoder makes
    visual_indicator_tokens: tuple[int, ...] = ()
    # rows and columns of the encoder's grid that make one placeholder
    spatial_merge_size: int = 2
    # a video's seconds in units of M-RoPE's first section; 0: a frame is one unit
    tokens_per_second: float = 0.0
    # the language model multiplies its input embeddings by it, the encoder's output too
    embed_scale: float = 1.0
    # placeholders that one image may have; 0: any number
    max_image_tokens: int = 0
    # M-RoPE goes by the place of an image's crops on one plane
    canvas: Canvas | None = None

    @property
    def embeds_images(self) -> bool:
        """Whether the encoder alone makes an image's vector."""
        return self.encoder == "embedding"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether all layers of the language model attend to the encoder's output."""
        return self.encoder == "encoder_decoder"

    @property
    def uses_cross_attention(self) -> bool:
        """Whether layers attend to the encoder's output, which then has one placeholder."""
        return self.encoder in ("cross_attention", "encoder_decoder")
