"""NCCL by its C interface (nccl.h): communicators whose calls take their place in the current
stream and can be recorded in CUDA graphs.

torch's own process groups run in streams and watchdog threads of theirs, and need a store to meet;
here the ranks meet through a group of the host, and who watches over them are their processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError, RankLost
from radixlm.distributed.groups import Group

LIBRARY = "libnccl.so.2"  # torch has loaded it, where it was built with CUDA
_ID_BYTES = 128
_BYTE = 1  # ncclUint8


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * _ID_BYTES),)


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_FUNCTIONS = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    # send, receive, count, type, ..., communicator, stream
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


@cache
def _library() -> ctypes.CDLL:
    """ConfigError where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"ranks on GPUs need {LIBRARY} ({error}): install nvidia-nccl-cu12 or -cu13, as torch "
            "names it; --gpu-id-step 0 works without, on one GPU"
        ) from error
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, _INT
    library.ncclGetErrorString.argtypes = (_INT,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *args: object) -> None:
    """RankLost if NCCL reports an error: the ranks cannot go on."""
    code = getattr(_library(), name)(*args)
    if code:
        text = _library().ncclGetErrorString(code).decode(errors="replace")
        raise RankLost(f"{name}: {text}")


class NcclComm:
    """A communicator of the ranks of ``host``, each with a GPU of its own. All make it at once; it
    takes some hundred MB of each GPU."""

    def __init__(self, host: Group, where: torch.device) -> None:
        self._size, self._where = host.size, where
        unique = _UniqueId()
        if host.rank == 0:
            _call("ncclGetUniqueId", ctypes.byref(unique))
        mine = torch.frombuffer(bytearray(unique), dtype=torch.uint8)
        shared = host.broadcast(mine, 0).numpy().tobytes()
        self._comm = ctypes.c_void_p()
        _call(
            "ncclCommInitRank",
            ctypes.byref(self._comm), host.size, _UniqueId.from_buffer_copy(shared), host.rank,
        )  # fmt: skip
        self.all_gather(torch.zeros(1, device=where))  # connects; no recording may be the first

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self._size, *x.shape))
        _call("ncclAllGather", x.data_ptr(), out.data_ptr(), x.nbytes, _BYTE, *self._end)
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        at = x.data_ptr()
        _call("ncclBroadcast", at, at, x.nbytes, _BYTE, source, *self._end)

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        _call("ncclGroupStart")
        for name, tensors in (("ncclSend", sent), ("ncclRecv", received)):
            for rank, x in enumerate(tensors):
                if x.nbytes:
                    _call(name, x.data_ptr(), x.nbytes, _BYTE, rank, *self._end)
        _call("ncclGroupEnd")

    @property
    def _end(self) -> tuple[ctypes.c_void_p, int]:
        """The last arguments of a call."""
        return self._comm, torch.cuda.current_stream(self._where).cuda_stream
