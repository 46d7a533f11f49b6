"""Media that the client has preprocessed: its processor's outputs, or the encoder's.

Arrays come as nested lists, as base64 of a file of numpy (.npy), safetensors or ``torch.save``, in
a program also as arrays or tensors. Nothing is unpickled.
"""

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import safetensors
from numpy.typing import NDArray

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.multimodal.torch_file import read_tensor

ROW_NAMES = ("precomputed_embeddings", "precomputed_features", "feature")
# fields that are not arrays
NOT_ARRAYS = frozenset(
    "format modality type input_ids attention_mask mm_token_type_ids token_type_ids offsets hash "
    "pad_value uuid".split()
)
FORMATS = ("processor_output", "precomputed_embedding")
MAX_BYTES = 1 << 30  # of all arrays of one image
MAX_SIDE = 100_000  # of sizes and grids: encoders allocate by them
# the processor's name of what a client may call "feature"
_MAIN = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "<i1", "U8": "<u1", "BOOL": "?",
}  # fmt: skip
_NPY, _ZIP = b"\x93NUMPY", b"PK"
AnyArray = NDArray[Any]


class Features(Record):
    """Checked input of one piece of media."""

    kind: str
    # the processor's outputs
    arrays: Mapping[str, AnyArray]
    # the encoder's output, float32 [1 + L, N, D]; None: the encoder reads ``arrays``
    rows: AnyArray | None
    # None: not known
    num_placeholders: int | None
    # the request's field, for error messages
    where: str


def is_features(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a part of a request holds preprocessed media instead of a URL."""
    if not isinstance(value, Mapping) or "url" in value:
        return False
    has_format = value.get("format") in FORMATS  # an audio clip's is "wav"
    return has_format or any(name in value for name in (*ROW_NAMES, *_MAIN.values()))


def read_features(
    sent: Mapping[str, Any], kind: str, where: str, width: int, depth: int, merge: int
) -> Features:
    """Check what a client sent. ``width``: of an embedding; ``depth``: decoder layers that get
    embeddings of their own (DeepStack); ``merge``: rows and columns of a grid that make one
    placeholder. InvalidRequest names ``where``."""
    is_rows = _is_rows(sent, where)
    arrays: dict[str, AnyArray] = {}
    for name, value in sent.items():
        if name not in NOT_ARRAYS and value is not None:
            arrays |= dict(_arrays(str(name), value, f"{where}.{name}"))
    if sum(array.nbytes for array in arrays.values()) > MAX_BYTES:
        raise InvalidRequest(f"{where}: more than {MAX_BYTES >> 20} MiB", where)
    if is_rows:
        name = next((one for one in ROW_NAMES if one in arrays), "")
        if not name:
            raise InvalidRequest(f"{where}: a precomputed embedding needs a feature", where)
        rows = _rows(arrays.pop(name), width, depth, f"{where}.{name}")
        _check_sizes(arrays, where)
        wanted = _of_grid(arrays, kind, merge, where)
        if wanted not in (None, rows.shape[1]):
            message = f"{where}: {rows.shape[1]} rows, the grid has placeholders for {wanted}"
            raise InvalidRequest(message, where)
        return Features(kind, arrays, rows, rows.shape[1], where)
    if "feature" in arrays:
        arrays[_MAIN[kind]] = arrays.pop("feature")
    if _MAIN[kind] not in arrays:
        raise InvalidRequest(f"{where}: a processor's output needs {_MAIN[kind]}", where)
    _check_sizes(arrays, where)
    return Features(kind, arrays, None, _of_grid(arrays, kind, merge, where), where)


def _is_rows(sent: Mapping[str, Any], where: str) -> bool:
    form = sent.get("format")
    if form is None:
        return any(name in sent for name in ROW_NAMES[:2])
    if form not in FORMATS:
        known = " and ".join(FORMATS)
        raise InvalidRequest(f"{where}.format: {form!r:.80} is none of {known}", where)
    return bool(form == FORMATS[1])


def _rows(value: AnyArray, width: int, depth: int, where: str) -> AnyArray:
    """[1 + depth, N, width] of [N, width], [B, N, width] or, with DeepStack layers, of
    [N, (1 + depth) * width]."""
    if value.ndim not in (2, 3) or not value.size or value.dtype.kind != "f":
        raise InvalidRequest(f"{where}: must be rows of numbers, not of {value.shape}", where)
    flat = value.reshape(-1, value.shape[-1]).astype(np.float32)
    if flat.shape[1] != width * (1 + depth):
        per = f"{1 + depth} x {width}" if depth else str(width)
        message = f"{where}: rows have {flat.shape[1]} numbers, the model's have {per}"
        raise InvalidRequest(message, where)
    if not np.isfinite(flat).all():
        raise InvalidRequest(f"{where}: holds numbers that are not finite", where)
    return np.ascontiguousarray(flat.reshape(len(flat), 1 + depth, width).swapaxes(0, 1))


def _check_sizes(arrays: Mapping[str, AnyArray], where: str) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidRequest(f"{where}.{name}: holds numbers that are not finite", where)
        is_size = array.dtype.kind in "iu" and not name.startswith("pixel")
        if is_size and array.size and not 0 <= array.min() <= array.max() <= MAX_SIDE:
            raise InvalidRequest(f"{where}.{name}: must be from 0 to {MAX_SIDE}", where)


def float_rows(text: str, where: str) -> NDArray[np.float32]:
    """The rows [N, D] of a file in base64; InvalidRequest names ``where``."""
    found = list(_arrays(where, text, where))
    rows = found[0][1] if len(found) == 1 else np.zeros(0)
    rows = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2 or not rows.size or rows.dtype.kind != "f" or not np.isfinite(rows).all():
        raise InvalidRequest(f"{where}: must be one tensor [tokens, width] of finite floats", where)
    return np.ascontiguousarray(rows, "<f4")


def _of_grid(arrays: Mapping[str, AnyArray], kind: str, merge: int, where: str) -> int | None:
    """How many placeholders the grids make; InvalidRequest if they are for another number of
    patches than were sent."""
    name = f"{kind}_grid_thw"
    grid = arrays.get(name)
    if grid is None:
        return None
    if grid.size % 3 or grid.dtype.kind not in "iu" or not (grid > 0).all():
        raise InvalidRequest(f"{where}.{name}: must hold frames, rows and columns", where)
    count = int(grid.reshape(-1, 3).astype(np.int64).prod(1).sum())
    main = arrays.get(_MAIN[kind])
    if main is not None and (main.ndim != 2 or len(main) != count):
        message = f"{where}.{name}: says {count} patches, {_MAIN[kind]} is of {main.shape}"
        raise InvalidRequest(message, where)
    return count // merge**2


def _arrays(name: str, value: Any, where: str) -> Iterator[tuple[str, AnyArray]]:
    """One array; a safetensors file may hold several, by their names."""
    if isinstance(value, str):
        raw = _decoded(value, where)
        if raw[:6] == _NPY:
            yield name, _plain(_npy(raw, where), where)
            return
        tensors = {name: _torch(raw, where)} if raw[:2] == _ZIP else _tensors(raw, where)
        for key, array in tensors.items():
            yield (name if len(tensors) == 1 else key), _plain(array, where)
        return
    if hasattr(value, "detach"):  # a tensor of a program in this process
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequest(f"{where}: must be nested lists of one shape", where) from None
    yield name, _plain(array, where)


def _decoded(text: str, where: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"{where}: more than {MAX_BYTES >> 20} MiB", where)
    text = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where}: neither lists nor base64", where) from None


def _npy(raw: bytes, where: str) -> AnyArray:
    try:
        array: AnyArray = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError, OSError, KeyError, SyntaxError, MemoryError) as error:
        raise InvalidRequest(f"{where}: a .npy file that cannot be read: {error}", where) from None
    return array


def _torch(raw: bytes, where: str) -> AnyArray:
    try:
        return read_tensor(raw, MAX_BYTES)
    except ValueError as error:
        raise InvalidRequest(f"{where}: a file of torch.save: {error}", where) from None


def _tensors(raw: bytes, where: str) -> dict[str, AnyArray]:
    what = "a pickle file" if raw[:2] == b"\x80\x02" else "no .npy"
    try:
        deserialize: Any = safetensors.deserialize
        return {name: _tensor(info) for name, info in deserialize(raw)}
    except (safetensors.SafetensorError, ValueError, KeyError, OverflowError):
        message = f"{where}: {what} and no safetensors file; only these are read"
        raise InvalidRequest(message, where) from None


def _tensor(info: Mapping[str, Any]) -> AnyArray:
    data, shape = bytes(info["data"]), info["shape"]
    if info["dtype"] == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return np.frombuffer(data, _DTYPES[info["dtype"]]).reshape(shape)


def _plain(array: AnyArray, where: str) -> AnyArray:
    """With a dtype that the engine accepts."""
    if array.dtype.kind not in "fiub" or array.ndim > 8:
        raise InvalidRequest(f"{where}: must hold numbers, not {array.dtype}", where)
    if array.dtype.kind in "iu" and array.dtype not in (np.int64, np.int32, np.uint8):
        return array.astype(np.int64)
    return array


def shared_out(
    features: Sequence[Features], places: NDArray[np.int64]
) -> list[tuple[Features, int]]:
    """How many of a prompt's placeholders (``places``) each fills, in order. InvalidRequest with
    both counts where they do not fit."""
    sizes = [one.num_placeholders for one in features]
    if len(sizes) == 1 and sizes[0] is None:
        return [(features[0], len(places))]
    where = features[0].where
    if None in sizes:
        raise InvalidRequest(
            f"{where}: send the processor's output for all images as one, or with its grids",
            where,
        )
    counts = [count for count in sizes if count is not None]
    if sum(counts) != len(places):
        raise InvalidRequest(
            f"{where}: {sum(counts)} rows for {len(places)} placeholders of the prompt; it has one "
            "placeholder for each row, or for each image",
            where,
        )
    return list(zip(features, counts, strict=True))


def spread(
    ids: NDArray[np.int32], places: NDArray[np.int64], features: Sequence[Features]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A prompt with one placeholder for each image as one with a placeholder for each row."""
    counts = [one.num_placeholders or 1 for one in features]
    if len(places) != len(counts) or sum(counts) == len(places):
        return ids, places
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = counts
    is_place = np.zeros(len(ids), bool)
    is_place[places] = True
    return np.repeat(ids, repeats), np.flatnonzero(np.repeat(is_place, repeats))
