"""What config.json says of a model's encoders, for those who read media and run the encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from radixlm.arch.families.composite import ADAPTED, COMPOSITES, PROMPT_SEES_ITSELF, TOWERED
from radixlm.arch.families.composite_newer import (
    BEFORE,
    ERNIES,
    KEEPING,
    MARKED,
    NUMBERED,
    Canvas,
    canvas_of,
    embed_scale,
    images_see_themselves,
    max_image_tokens,
)
from radixlm.arch.families.encoded import ENCODED
from radixlm.arch.families.hearing import HEARING
from radixlm.arch.families.media_layouts_audio import OMNIS, unwrapped
from radixlm.arch.families.media_layouts_llava import LLAVA_TEXTS, WATCHING
from radixlm.arch.families.media_layouts_more import VILAS
from radixlm.base.record import Record

Bidirectional = Literal["", "media", "prompt"]

# whose class does more with what the encoders make than to put it in its places
BY_FORWARD = (
    *("Llama4ForConditionalGeneration", "Ovis2ForConditionalGeneration"),
    *("Qwen2AudioForConditionalGeneration", "Gemma3nForConditionalGeneration"),
    *ADAPTED,
)
# whose text attends to images in layers of their own
CROSSED = ("MllamaForConditionalGeneration",)
# whose encoder makes a vector by itself, beside the text model's
VECTORS = ("CLIPModel",)
# whose videos come with their audio, or are not read
NO_VIDEOS = (
    "Qwen2_5OmniThinkerForConditionalGeneration",
    *OMNIS,
    *VILAS,
    *(*ERNIES, *MARKED),
)
# whose videos are images, in the prompt too
FRAMED = ("InternVLForConditionalGeneration", "SmolVLMForConditionalGeneration")
# whose places of an image see one another
IMAGES_SEE_THEMSELVES = ("Gemma3ForConditionalGeneration", *MARKED)


class MultimodalSpec(Record):
    """``tokens``: kind -> the id that stands for it in a prompt. ``visual_indicator_tokens``: ids
    beside them
    whose embeddings are the encoder's too. ``merge``: so many rows and columns of an encoder's
    grid make
    one place. ``mutual``: which places see one another forwards too: an image's, or the whole
    prompt's. ``uses_class_forward``: the rule that joins media and text is in the forward of the
    class.
    ``tokens_per_second``: of time in the rope of a video, 0 where a frame is one step.
    ``uses_cross_attention``: an image has one place, and layers of their own attend to what its
    encoder
    makes (``spec.CrossAttention``). ``embeds_images``: an encoder makes an image's vector, and the
    language model takes no part in it. ``embed_scale``: the text model multiplies what an encoder
    makes
    by it. ``max_image_tokens``: of an image whose places see one another; 0: any number.
    ``is_encoder_decoder``: an encoder hears, to whose rows all layers of the decoder attend.
    ``reads_video``:
    the processor alone names their token. ``canvas``: ropes turn by the place on it.
    ``rope_by_image_index``: by an image's number, which has no effect on the text behind.
    ``image_first``: an
    image stands before the text, where the processor puts it. ``single_image``: a prompt has one.
    ``needs_token_ids``: layers read the tokens in its places. ``adds_to_embeddings``: the marks
    around it and in
    it are places too, to whose embeddings nothing is added. ``video_as_images``: a video is images,
    to the encoder and in the prompt."""

    tokens: Mapping[str, int]
    visual_indicator_tokens: tuple[int, ...] = ()
    merge: int = 2
    bidirectional: Bidirectional = ""
    uses_class_forward: bool = False
    tokens_per_second: float = 0.0
    uses_cross_attention: bool = False
    embeds_images: bool = False
    is_encoder_decoder: bool = False
    embed_scale: float = 1.0
    max_image_tokens: int = 0
    reads_video: bool = False
    canvas: Canvas | None = None
    rope_by_image_index: bool = False
    image_first: bool = False
    single_image: bool = False
    needs_token_ids: bool = False
    adds_to_embeddings: bool = False
    video_as_images: bool = False


def multimodal_spec(architecture: str, raw: Mapping[str, Any]) -> MultimodalSpec | None:
    """Of a config.json as it is written; None for a model without encoders."""
    if architecture in VECTORS:
        return MultimodalSpec({}, embeds_images=True)
    raw = unwrapped(raw)
    if architecture in ENCODED:
        start = int(raw["decoder_start_token_id"])
        return MultimodalSpec({"audio": start}, uses_cross_attention=True, is_encoder_decoder=True)
    if architecture not in (*HEARING, *COMPOSITES, *TOWERED, *CROSSED, *ADAPTED, *LLAVA_TEXTS):
        return None
    tokens = {}
    for kind in ("image", "video", "audio"):
        if kind == "video" and architecture in NO_VIDEOS:
            continue
        if kind == "audio" and raw.get("audio_config", raw) is None:
            continue  # a smaller one of the family, without ears
        token = raw.get(f"{kind}_token_id", raw.get(f"{kind}_token_index"))
        if isinstance(token, int):
            tokens[kind] = token
    place = raw.get("media_placeholder_token_id", raw.get("image_patch_id"))
    if isinstance(place, int):
        tokens["image"] = place
    is_mutual = architecture in IMAGES_SEE_THEMSELVES or images_see_themselves(architecture, raw)
    vision = raw.get("vision_config") or {}
    if architecture in ADAPTED and isinstance(vision.get("image_token_id"), int):
        tokens["image"] = vision["image_token_id"]  # speech beside images is another model's
    mutual: Bidirectional = "prompt" if architecture in PROMPT_SEES_ITSELF else ""
    return MultimodalSpec(
        tokens,
        tuple(raw.get("visual_indicator_token_ids") or ()),
        int(vision.get("spatial_merge_size") or 2),
        "media" if is_mutual else mutual,
        architecture in BY_FORWARD,
        float(vision.get("tokens_per_second") or 0),
        architecture in CROSSED,
        embed_scale=embed_scale(architecture, raw),
        max_image_tokens=max_image_tokens(architecture, raw),
        reads_video=architecture in WATCHING,
        canvas=canvas_of(architecture, raw),
        rope_by_image_index=architecture in NUMBERED,
        image_first=architecture in BEFORE,
        single_image=architecture in (*BEFORE, *MARKED),
        needs_token_ids=architecture in KEEPING,
        adds_to_embeddings=architecture in MARKED,
        video_as_images=architecture in FRAMED,
    )
