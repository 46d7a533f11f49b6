"""Hf3fsStore: the files of FileStore in a mounted 3FS."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.tiers.stores.base import StoreOptions
from radixlm.tiers.stores.file import FileOptions, FileStore


class Hf3fsStore(FileStore):
    """3FS is used by its file interface: its client library (USRBIO) has no package to install.
    The folder and the budget come from ``file_path_prefix`` and ``file_size`` (bytes) of the JSON
    file $SGLANG_HICACHE_HF3FS_CONFIG_PATH where the options have none."""

    Options: ClassVar[type[StoreOptions]] = FileOptions
    medium: ClassVar[str] = "EXTERNAL"

    def __init__(self, options: FileOptions, namespace: str) -> None:
        path = env.HF3FS_CONFIG_PATH.get()
        if path and not options.directory:
            try:
                with open(path, "rb") as file:
                    stored = msgspec.json.decode(file.read(), type=dict[str, Any])
                directory, size = str(stored["file_path_prefix"]), float(stored["file_size"])
            except (OSError, msgspec.DecodeError, KeyError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"SGLANG_HICACHE_HF3FS_CONFIG_PATH={path!r}: {error!r}; it is an object with "
                    "file_path_prefix and file_size"
                ) from error
            options = msgspec.structs.replace(options, directory=directory, max_gb=size / 2**30)
        super().__init__(options, namespace)
