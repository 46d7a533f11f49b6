"""Images, video and audio."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import Flag, Group


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
            choices=("sdpa", "fa3", "fa4", "triton_attn", "flashinfer_cudnn", "aiter_attn"),
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
