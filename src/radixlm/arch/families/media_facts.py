"""What config.json says of a model's towers, for those who read media and run the towers."""

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
    most_places,
    pictures_see_themselves,
    row_scale,
)
from radixlm.arch.families.encoded import ENCODED
from radixlm.arch.families.hearing import HEARING
from radixlm.arch.families.media_layouts_audio import OMNIS, unwrapped
from radixlm.arch.families.media_layouts_llava import LLAVA_TEXTS, WATCHING
from radixlm.arch.families.media_layouts_more import VILAS
from radixlm.base.record import Record

Mutual = Literal["", "media", "prompt"]

# whose class does more with what the towers make than to put it in its places
BY_FORWARD = (
    *("Llama4ForConditionalGeneration", "Ovis2ForConditionalGeneration"),
    *("Qwen2AudioForConditionalGeneration", "Gemma3nForConditionalGeneration"),
    *ADAPTED,
)
# whose text attends to pictures in layers of their own
CROSSED = ("MllamaForConditionalGeneration",)
# whose tower makes a vector by itself, beside the text model's
VECTORS = ("CLIPModel",)
# whose films come with their sound, or are not read
NO_FILMS = (
    "Qwen2_5OmniThinkerForConditionalGeneration",
    *OMNIS,
    *VILAS,
    *(*ERNIES, *MARKED),
)
# whose films are pictures, in the prompt too
FRAMED = ("InternVLForConditionalGeneration", "SmolVLMForConditionalGeneration")
# whose places of a picture see one another
PICTURES_SEE_THEMSELVES = ("Gemma3ForConditionalGeneration", *MARKED)


class MediaFacts(Record):
    """``tokens``: kind -> the id that stands for it in a prompt. ``indicators``: ids beside them
    whose embeddings are the tower's too. ``merge``: so many rows and columns of a tower's grid make
    one place. ``mutual``: which places see one another forwards too: a picture's, or the whole
    prompt's. ``by_forward``: the rule that joins media and text is in the forward of the class.
    ``places_per_second``: of time in the rope of a film, 0 where a frame is one step.
    ``is_crossed``: a picture has one place, and layers of their own attend to what its tower
    makes (``spec.CrossAttention``). ``gives_vector``: a tower makes a picture's vector, and the
    language model takes no part in it. ``row_scale``: the text model multiplies what a tower makes
    by it. ``most_places``: of a picture whose places see one another; 0: any number.
    ``is_encoded``: an encoder hears, to whose rows all layers of the decoder attend. ``has_films``:
    the processor alone names their token. ``canvas``: ropes turn by the place on it.
    ``is_numbered``: by a picture's number, which has no effect on the text behind. ``is_before``: a
    picture stands before the text, where the processor puts it. ``is_single``: a prompt has one.
    ``keeps_ids``: layers read the tokens in its places. ``has_marks``: the marks around it and in
    it are places too, to whose embeddings nothing is added. ``has_frames``: a film is pictures,
    to the tower and in the prompt."""

    tokens: Mapping[str, int]
    indicators: tuple[int, ...] = ()
    merge: int = 2
    mutual: Mutual = ""
    by_forward: bool = False
    places_per_second: float = 0.0
    is_crossed: bool = False
    gives_vector: bool = False
    is_encoded: bool = False
    row_scale: float = 1.0
    most_places: int = 0
    has_films: bool = False
    canvas: Canvas | None = None
    is_numbered: bool = False
    is_before: bool = False
    is_single: bool = False
    keeps_ids: bool = False
    has_marks: bool = False
    has_frames: bool = False


def media_facts(architecture: str, raw: Mapping[str, Any]) -> MediaFacts | None:
    """Of a config.json as it is written; None for a model without towers."""
    if architecture in VECTORS:
        return MediaFacts({}, gives_vector=True)
    raw = unwrapped(raw)
    if architecture in ENCODED:
        start = int(raw["decoder_start_token_id"])
        return MediaFacts({"audio": start}, is_crossed=True, is_encoded=True)
    if architecture not in (*HEARING, *COMPOSITES, *TOWERED, *CROSSED, *ADAPTED, *LLAVA_TEXTS):
        return None
    tokens = {}
    for kind in ("image", "video", "audio"):
        if kind == "video" and architecture in NO_FILMS:
            continue
        if kind == "audio" and raw.get("audio_config", raw) is None:
            continue  # a smaller one of the family, without ears
        token = raw.get(f"{kind}_token_id", raw.get(f"{kind}_token_index"))
        if isinstance(token, int):
            tokens[kind] = token
    place = raw.get("media_placeholder_token_id", raw.get("image_patch_id"))
    if isinstance(place, int):
        tokens["image"] = place
    is_mutual = architecture in PICTURES_SEE_THEMSELVES or pictures_see_themselves(
        architecture, raw
    )
    vision = raw.get("vision_config") or {}
    if architecture in ADAPTED and isinstance(vision.get("image_token_id"), int):
        tokens["image"] = vision["image_token_id"]  # speech beside pictures is another model's
    mutual: Mutual = "prompt" if architecture in PROMPT_SEES_ITSELF else ""
    return MediaFacts(
        tokens,
        tuple(raw.get("visual_indicator_token_ids") or ()),
        int(vision.get("spatial_merge_size") or 2),
        "media" if is_mutual else mutual,
        architecture in BY_FORWARD,
        float(vision.get("tokens_per_second") or 0),
        architecture in CROSSED,
        row_scale=row_scale(architecture, raw),
        most_places=most_places(architecture, raw),
        has_films=architecture in WATCHING,
        canvas=canvas_of(architecture, raw),
        is_numbered=architecture in NUMBERED,
        is_before=architecture in BEFORE,
        is_single=architecture in (*BEFORE, *MARKED),
        keeps_ids=architecture in KEEPING,
        has_marks=architecture in MARKED,
        has_frames=architecture in FRAMED,
    )
