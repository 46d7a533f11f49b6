"""LoRA adapters of ``radixlm.Engine``, under SGLang's names."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from radixlm.base.lazy import load
from radixlm.engine.launch import ProgramEngine

T = TypeVar("T")


class EngineLora:
    """Adapters that come and go while the engine runs. Each call gives ``success``,
    ``error_message`` and ``loaded_adapters`` (name -> folder)."""

    _engine: ProgramEngine

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> dict[str, Any]:
        """Load an adapter from a folder, as ``/load_lora_adapter`` does; requests name it as
        ``lora_path``. InvalidRequest if it cannot be."""
        self._wait(self._engine.intake.adapters.load(lora_name, lora_path, pinned))
        return self._loaded()

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> dict[str, Any]:
        """``load_lora_adapter`` for a caller with an event loop of its own."""
        await self._await(self._engine.intake.adapters.load(lora_name, lora_path, pinned))
        return self._loaded()

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Mapping[str, Any] | Sequence[tuple[str, Any]],
        config_dict: dict[str, Any],
        pinned: bool = False,
    ) -> dict[str, Any]:
        """The same of torch tensors by their names in PEFT's file and its adapter_config.json."""
        adapters, save = self._engine.intake.adapters, load("safetensors.torch:save")
        self._wait(adapters.load_bytes(lora_name, config_dict, save(dict(tensors)), pinned))
        return self._loaded()

    def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Unload an adapter; returns when its last request is over."""
        self._wait(self._engine.intake.adapters.unload(lora_name))
        return self._loaded()

    async def async_unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """``unload_lora_adapter`` for a caller with an event loop of its own."""
        await self._await(self._engine.intake.adapters.unload(lora_name))
        return self._loaded()

    def _loaded(self) -> dict[str, Any]:
        adapters = self._engine.intake.adapters.loaded
        return {"success": True, "error_message": "", "loaded_adapters": adapters}
