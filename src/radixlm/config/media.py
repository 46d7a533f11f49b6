"""Images, video and audio."""

from dataclasses import dataclass
from typing import Annotated, Any

from radixlm.config.flag import POSITIVE, Flag, Group

_BOUNDS = {"min_pixels": int, "max_pixels": int}
PROCESS_OPTIONS: dict[str, dict[str, Any]] = {
    "image": _BOUNDS,
    "video": _BOUNDS | {"fps": int | float, "max_frames": int},
    "audio": {},
}
"""Options of --mm-process-config by modality, and their types."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MediaConfig(Group):
    """Multimodal input."""

    enable_multimodal: Annotated[
        bool | None,
        "Accept images if the model can; --enable-multimodal false loads the language model alone.",
    ] = None
    mm_attention_backend: Annotated[
        str | None,
        "Attention kernels of the vision and audio encoders.",
        Flag(
            choices=(
                "sdpa",
                "fa3",
                "fa4",
                "triton_attn",
                "flashinfer_cudnn",
                "aiter_attn",
                "amx_attn",
                "ascend_attn",
                "xpu_attn",
            ),
            built=("sdpa",),
            why="the encoders attend with torch's sdpa, which gives the same numbers",
        ),
    ] = None
    disable_fast_image_processor: Annotated[
        bool,
        "Use the image processor that works on Pillow and numpy, also where torchvision is there.",
    ] = False
    allow_local_media: Annotated[
        tuple[str, ...] | None,
        "Folders whose files requests may name; without a value any file and private addresses.",
        Flag(const=("/",)),
    ] = None
    limit_mm_data_per_request: Annotated[
        str | None,
        'JSON object: the most images, videos and audios of a request, such as {"image": 4}.',
        Flag(is_json=True),
    ] = None
    mm_process_config: Annotated[
        str,
        "JSON object: how media of all requests are processed: min_pixels and max_pixels of image "
        'and video, fps and max_frames of video, such as {"video": {"fps": 1, "max_frames": 32}}.',
        Flag(is_json=True),
    ] = "{}"
    allowed_media_domains: Annotated[
        tuple[str, ...] | None,
        "Domains that media are fetched from, their subdomains included; any when unset.",
    ] = None
    media_url_max_file_size_mb: Annotated[
        int, "Largest image, video or audio of a request, in MiB.", Flag(within=POSITIVE)
    ] = 32
