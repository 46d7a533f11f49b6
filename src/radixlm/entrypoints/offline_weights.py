"""Updates of the weights of ``radixlm.Engine``, under SGLang's names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest, TransferError
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import ProgramEngine
from radixlm.engine.model_info import find_model
from radixlm.engine.tensor_updates import TensorUpdates, read_infos
from radixlm.engine.weight_groups import read_place
from radixlm.hub.locate import Wanted
from radixlm.weight_updates.registry import WeightsOutcome, WeightsUpdate
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.weights_client import encode, unflatten

T = TypeVar("T")
Outcome = tuple[bool, str]
GROUP = "weight_update_group"


class EngineWeights:
    """Each method returns whether it worked, and a message: the old weights stay if it did not.
    ``options``: ``abort_all_requests``, ``weight_version``, and ``mode`` for running requests
    (wait, abort, retract, in_place). Methods ``async_...`` are for callers with an event loop."""

    config: ServerConfig
    _engine: ProgramEngine

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    @cached_property
    def _updates(self) -> TensorUpdates:
        return TensorUpdates(self.config, self._engine.intake)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a parameter as nested lists, None if there is none."""
        reply = self._wait(
            self._engine.intake.control("weights_by_name", name=name, truncate_size=truncate_size)
        )
        return reply.data if reply.ok else None

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **options: Any
    ) -> tuple[bool, str, int]:
        """Serve the weights of another checkpoint of the same model from now on; also the number
        of requests that it paused."""
        return self._wait(self._from_disk(model_path, load_format, **options))

    async def async_update_weights_from_disk(
        self, *args: Any, **options: Any
    ) -> tuple[bool, str, int]:
        """``update_weights_from_disk``."""
        return await self._await(self._from_disk(*args, **options))

    async def _from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> tuple[bool, str, int]:
        try:
            asked = _asked(flush_cache, options)
            wanted = Wanted(flag="model_path", is_newest=True)
            folder = await asyncio.to_thread(find_model, model_path, wanted)
            update = replace(
                asked,
                folder=str(folder.resolve()),
                load_format=load_format,
                is_partial=False,
                model_path=model_path,
            )
            outcome = await self._engine.intake.weights.update(update)
        except (ConfigError, CheckpointError, InvalidRequest, TransferError) as error:
            return False, str(error).replace("--model-path", "model_path"), 0
        return outcome.is_ok, outcome.message, outcome.num_paused

    def update_weights_from_tensor(
        self,
        named_tensors: Any,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> Outcome:
        """Replace tensors: pairs of a name in the checkpoint and a torch tensor (or a mapping of
        them), safetensors bytes, or with ``load_format`` "flattened_bucket" a dict with
        "flattened_tensor" and "metadata"."""
        return self._wait(self._from_tensor(named_tensors, load_format, flush_cache, **options))

    async def async_update_weights_from_tensor(self, *args: Any, **options: Any) -> Outcome:
        """``update_weights_from_tensor``."""
        return await self._await(self._from_tensor(*args, **options))

    async def _from_tensor(
        self,
        named_tensors: Any,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> Outcome:
        async def fill(spool: TensorSpool) -> None:
            await asyncio.to_thread(_add, spool, named_tensors, load_format)

        async def work() -> WeightsOutcome:
            return await self._updates.update(fill, _asked(flush_cache, options), load_format)

        return await _outcome(work)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: str | None = None,
    ) -> Outcome:
        """Meet a trainer, which is rank 0, in a process group of torch.distributed."""
        place = (master_address, master_port, rank_offset, world_size)
        return self._wait(self._join(*place, group_name, backend))

    async def async_init_weights_update_group(self, *args: Any, **options: Any) -> Outcome:
        """``init_weights_update_group``."""
        return await self._await(self._join(*args, **options))

    async def _join(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: str | None = None,
    ) -> Outcome:
        async def work() -> str:
            place = read_place(master_address, master_port, rank_offset, world_size, backend)
            await self._updates.groups.join(group_name, place)
            return "Succeeded to initialize custom process group."

        return await _outcome(work)

    def destroy_weights_update_group(self, group_name: str = GROUP) -> Outcome:

        async def work() -> str:
            await self._updates.groups.leave(group_name)
            return "Succeeded to destroy custom process group."

        return self._wait(_outcome(work))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP,
        flush_cache: bool = True,
        load_format: str | None = None,
        **options: Any,
    ) -> Outcome:
        """Replace tensors by those that the trainer of the group broadcasts, in this order."""
        what = (names, dtypes, shapes, group_name, flush_cache, load_format)
        return self._wait(self._receive(*what, **options))

    async def async_update_weights_from_distributed(self, *args: Any, **options: Any) -> Outcome:
        """``update_weights_from_distributed``."""
        return await self._await(self._receive(*args, **options))

    async def _receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP,
        flush_cache: bool = True,
        load_format: str | None = None,
        **options: Any,
    ) -> Outcome:
        async def work() -> WeightsOutcome:
            infos, asked = read_infos(names, dtypes, shapes), _asked(flush_cache, options)
            return await self._updates.receive(group_name, infos, asked, load_format)

        return await _outcome(work)

    def begin_weight_update(self, selector: str = "all") -> Outcome:
        """Keep the tensors of the calls that follow, until ``end_weight_update``."""

        async def work() -> str:
            await self._updates.begin(selector)
            return "Succeeded to begin a weight update."

        return self._wait(_outcome(work))

    def end_weight_update(self, discard: bool = False, **options: Any) -> Outcome:
        """Make one update of all that was kept, or forget it."""

        async def work() -> WeightsOutcome:
            return await self._updates.end(_asked(True, options), discard)

        return self._wait(_outcome(work))

    def check_weights(self, action: str = "checksum") -> dict[str, Any]:
        """What ``/weights_checker`` does: "checksum" has the SHA-256 of each tensor under
        "checksums", "snapshot" remembers them, "compare" raises InvalidRequest if they differ."""
        return self._wait(self._updates.check(action))[0]

    def save_sharded_model(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write the parameters that are served to a folder for ``load_format="sharded_state"``,
        besides config and tokenizer; ``max_size``: bytes of a file. InvalidRequest if it cannot."""
        self._wait(self._updates.save(path, pattern, max_size))


async def _outcome(work: Callable[[], Coroutine[Any, Any, WeightsOutcome | str]]) -> Outcome:
    try:
        outcome = await work()
    except InvalidRequest as error:
        return False, str(error)
    return (True, outcome) if isinstance(outcome, str) else (outcome.is_ok, outcome.message)


def _asked(flush: bool, options: Mapping[str, Any]) -> WeightsUpdate:
    """The update that the arguments of a call ask for; InvalidRequest for unknown ones."""
    known = {"abort_all_requests", "weight_version", "mode"}
    if unknown := options.keys() - known:
        raise InvalidRequest(
            f"{min(unknown)}: no argument of this call; {', '.join(sorted(known))}"
        )
    mode = options.get("mode") or ("abort" if options.get("abort_all_requests") else "wait")
    version = options.get("weight_version")
    return WeightsUpdate("", is_partial=True, version=version, mode=mode, flush=flush)


def _add(spool: TensorSpool, sent: Any, load_format: str | None) -> None:
    """Write what a caller has given as ``named_tensors``; of a list for several ranks, which all
    get the same, the first."""
    is_list = isinstance(sent, list | tuple) and len(sent) > 0
    if isinstance(sent, str) or (is_list and all(isinstance(one, str) for one in sent)):
        spool.add_base64(sent, load_format)
    elif isinstance(sent, bytes | bytearray):
        spool.add_bytes(bytes(sent), load_format)
    elif is_list and isinstance(sent[0], bytes | Mapping):
        _add(spool, sent[0], load_format)
    elif load_format == "flattened_bucket" and isinstance(sent, Mapping):
        spool.add_pieces(encode(unflatten(sent))[1])
    else:
        spool.add_pieces(encode(sent)[1])
