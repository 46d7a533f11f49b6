"""``mm_processor_kwargs``: the options of the processor that a request may set."""

from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.image import MAX_PIXELS

# They bound the size of images. Others would change the shapes that the encoder was built for.
_OPTIONS = ("min_pixels", "max_pixels")


def checked_options(processor: Any, options: Mapping[str, Any] | None) -> dict[str, int]:
    """InvalidRequest for an option that the image processor does not know, and for a value out of
    bounds."""
    kind = type(getattr(processor, "image_processor", None))
    taken = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", {})
    known = [name for name in _OPTIONS if name in taken]
    for name, value in (options or {}).items():
        where = f"mm_processor_kwargs.{name!s:.40}"
        if name not in known:
            may = " and ".join(known) or "none"
            raise InvalidRequest(f"{where}: requests to this model may set {may}", where)
        if type(value) is not int or not 1 <= value <= MAX_PIXELS:
            raise InvalidRequest(f"{where} must be an integer in [1, {MAX_PIXELS}]", where)
    return dict(options or {})
