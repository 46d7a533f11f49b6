"""The tier over a store: pages come back bit for bit, and every fault is a miss that is counted."""

import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixlm.base.errors import ConfigError, TransferError
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.tiers.base import PageRecord
from radixlm.tiers.keys import namespace_seed, page_keys
from radixlm.tiers.manifest import Manifest, Rectangle
from radixlm.tiers.stores import make_store, read_extra
from radixlm.tiers.stores.base import StoreOptions
from radixlm.tiers.stores.file import FileOptions, FileStore
from radixlm.tiers.stores.grid import Grid
from radixlm.tiers.stores.tier import StoreTier
from tests.tiers.stores import servers
from tests.tiers.stores.test_contract import MemoryStore

PAGE, NUM_BYTES, WINDOW_BYTES = 4, 3000, 700
LIMIT_S = 20.0


def manifest(**changed: Any) -> Manifest:
    fields = {"model": "m", "weights_digest": "w", "weights_version": "1", "kv_dtype": "bf16"}
    sizes = {"page_size": PAGE, "page_bytes": (NUM_BYTES, WINDOW_BYTES)}
    return Manifest(**{**fields, **sizes, **changed})


def keys_of(text: str, its: Manifest, salt: str | None = None, secret: bytes = b"") -> list[bytes]:
    seed = namespace_seed(its.digest, CacheNamespace(cache_salt=salt), secret)
    return page_keys(np.frombuffer(text.encode(), np.uint8).astype(np.int32), PAGE, seed)


KEYS = keys_of("what is asked twice is found", manifest())


def payload(key: bytes, num_bytes: int = NUM_BYTES) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, num_bytes, np.uint8)


def records(keys: list[bytes], num_bytes: int = NUM_BYTES) -> list[PageRecord]:
    tokens = np.zeros(PAGE, np.int32)
    return [PageRecord(key, bytes(32), tokens, payload(key, num_bytes)) for key in keys]


def fetch(tier: StoreTier, keys: list[bytes], num_bytes: int = NUM_BYTES) -> int:
    """How many leading pages the tier gives; each must be right."""
    out = [np.zeros(num_bytes, np.uint8) for _ in keys]
    found = tier.get(keys, out)
    for key, page in zip(keys[:found], out[:found], strict=True):
        assert np.array_equal(page, payload(key, num_bytes))
    return found


class Faulty(MemoryStore):
    """Raises, hangs or changes what it returns, as told."""

    medium = "EXTERNAL"

    def __init__(self) -> None:
        super().__init__({}, "")
        self.shared = {}
        self.error: BaseException | None = None
        self.gate = threading.Event()  # closed: calls hang
        self.gate.set()
        self.change: Callable[[bytearray], bytes] | None = None
        self.calls = 0

    def _pass(self) -> None:
        self.calls += 1
        assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error

    def open(self) -> None:
        self._pass()

    def exists(self, names: list[str]) -> list[bool]:
        self._pass()
        return super().exists(names)

    def get(self, names: list[str], buffers: list[memoryview]) -> list[int]:
        self._pass()
        lengths = super().get(names, buffers)
        for number, (length, buffer) in enumerate(zip(lengths, buffers, strict=True)):
            if self.change is not None and length >= 0:
                changed = self.change(bytearray(buffer[:length]))
                lengths[number] = len(changed)
                buffer[: len(changed)] = changed
        return lengths

    def put(self, names: list[str], values: list[bytes]) -> None:
        self._pass()
        super().put(names, values)


class World:
    def __init__(self, **options: Any) -> None:
        self.store, self.now = Faulty(), 0.0
        self.tiers: list[StoreTier] = []
        self.options = StoreOptions(
            **{"deadline_s": LIMIT_S, "lookup_deadline_s": LIMIT_S} | options
        )

    def tier(self, its: Manifest | None = None, secret: bytes = b"") -> StoreTier:
        grid = Grid(its or manifest(), self.options)
        args = self.store, "test", grid, secret, self.options, lambda: self.now
        self.tiers.append(StoreTier(*args))
        return self.tiers[-1]

    def close(self) -> None:
        self.store.gate.set()
        for tier in self.tiers:
            tier.close()


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        world = World()
        stack.callback(world.close)
        yield world


def filled(world: World, **changed: Any) -> StoreTier:
    tier = world.tier(**changed)
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S)
    return tier


def test_pages_come_back_to_any_server_of_the_same_model(world: World) -> None:
    tier = filled(world)
    for reader in (tier, world.tier()):
        assert reader.contains(KEYS) == fetch(reader, KEYS) == len(KEYS)
        assert reader.contains([KEYS[0], bytes(32), KEYS[1]]) == 1
        assert fetch(reader, [KEYS[0], bytes(32), KEYS[1]]) == 1
    assert tier.stats()["put_pages"] == len(KEYS)
    assert tier.stats()["hit_pages"] == len(KEYS) + 1 and tier.stats()["missed_pages"] == 2
    tier.clear()
    assert tier.contains(KEYS) == 0 and fetch(tier, KEYS) == 0


def test_pages_of_windows_have_their_own_length(world: World) -> None:
    tier = filled(world)
    window = [bytes([7]) * 32]
    tier.put(records(window, WINDOW_BYTES))
    assert tier.flush(LIMIT_S)
    assert tier.contains(window) == fetch(tier, window, WINDOW_BYTES) == 1
    assert fetch(tier, window) == 0  # asked for as a full page
    assert tier.stats()["foreign_pages"] == 1
    assert fetch(tier, KEYS, 123) == 0  # no page has that length


@pytest.mark.parametrize("field", ["weights_version", "kv_dtype", "layout", "numerics", "model"])
def test_pages_of_another_model_or_older_weights_are_not_found(world: World, field: str) -> None:
    filled(world)
    other = manifest(**{field: "other"})
    assert fetch(world.tier(other), keys_of("what is asked twice is found", other)) == 0
    assert Grid(other).digest != Grid(manifest()).digest  # the namespace of the objects


def test_an_old_page_that_is_replayed_under_a_new_name_is_a_miss(world: World) -> None:
    old, new = manifest(weights_version="0"), manifest()
    tier = filled(world, its=old)
    old_store = dict(world.store.shared)
    tier.clear()
    again = keys_of("what is asked twice is found", new)
    cell = Grid(new).names[0]
    for key, page in zip(again, old_store.values(), strict=True):
        world.store.shared[f"/{key.hex()[:32]}_{cell}"] = page
    reader = world.tier()
    assert reader.contains(again) == len(again) and fetch(reader, again) == 0
    assert reader.stats()["foreign_pages"] == 1


def test_a_tenant_never_hits_another_ones_pages(world: World) -> None:
    its, secret = manifest(), b"of the server"
    mine = keys_of("a secret prompt", its, "tenant a", secret)
    tier = world.tier(secret=secret)
    tier.put(records(mine))
    assert tier.flush(LIMIT_S) and tier.contains(mine) == len(mine)
    guesses = [
        keys_of("a secret prompt", its, salt, guess)
        for salt in ("tenant b", "tenant a", None, "")
        for guess in (b"", b"guess", secret)
        if (salt, guess) != ("tenant a", secret)
    ]
    assert [tier.contains(keys) + fetch(tier, keys) for keys in guesses] == [0] * len(guesses)


def test_pages_without_the_servers_secret_are_misses_and_are_replaced(world: World) -> None:
    filled(world)  # a writer without the secret
    tier = world.tier(secret=b"secret")
    assert tier.contains(KEYS) == len(KEYS)
    assert fetch(tier, KEYS) == 0 and tier.stats()["damaged_pages"] == 1
    assert tier.contains(KEYS) == 0  # the first one is known to be bad
    tier.put(records(KEYS[:1]))
    assert tier.flush(LIMIT_S) and fetch(tier, KEYS[:1]) == 1
    assert fetch(world.tier(secret=b"secret"), KEYS[:1]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1],
        lambda frame: frame[:50],
        lambda frame: b"",
        lambda frame: bytes(len(frame)),
        lambda frame: frame[:200] + bytes([frame[200] ^ 1]) + frame[201:],
        lambda frame: frame[:96] + b"\xff" * 8 + frame[104:],  # a length of 2 ** 64 - 1
    ],
)
def test_short_and_wrong_data_are_misses(world: World, change: Any) -> None:
    tier = filled(world)
    world.store.change = change
    assert fetch(tier, KEYS) == 0
    counts = tier.stats()
    assert sum(counts.get(f"{fault}_pages", 0) for fault in ("short", "damaged", "foreign")) == 1
    assert counts["breaker_open"] == 0  # the store works


def test_random_flipped_bits_never_pass(world: World) -> None:
    tier, drawn = filled(world), np.random.default_rng(1)

    def flip(frame: bytearray) -> bytes:
        frame[drawn.integers(len(frame))] ^= 1 << drawn.integers(8)
        return bytes(frame)

    world.store.change = flip
    assert sum(fetch(tier, [key]) for key in KEYS for _ in range(100)) == 0


def test_a_store_that_is_down_at_the_start_is_found_later(world: World) -> None:
    world.store.error = ConnectionError("refused")
    tier = world.tier()
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S) and tier.contains(KEYS) == 0 == fetch(tier, KEYS)
    assert tier.stats()["errors"] == 3 and tier.stats()["dropped_pages"] == len(KEYS)
    world.store.error = None
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S) and fetch(tier, KEYS) == len(KEYS)


def test_the_breaker_opens_after_five_failures_and_closes_after_a_trial(world: World) -> None:
    tier = filled(world)
    world.store.error = OSError("the store dies")
    for _ in range(4):
        assert fetch(tier, KEYS) == 0
    world.now = 11.0  # the first four are too old to count
    for _ in range(4):
        assert fetch(tier, KEYS) == 0
    assert not tier.breaker.is_open
    assert fetch(tier, KEYS) == 0
    calls = world.store.calls
    assert tier.breaker.is_open and fetch(tier, KEYS) == 0 == tier.contains(KEYS)
    assert world.store.calls == calls  # not asked any more
    world.now += 10.0
    assert fetch(tier, KEYS) == 0 and world.store.calls == calls + 1  # one trial, which fails
    assert fetch(tier, KEYS) == 0 and world.store.calls == calls + 1
    world.store.error = None
    world.now += 10.0
    assert fetch(tier, KEYS) == len(KEYS) and not tier.breaker.is_open


def test_a_store_that_hangs_costs_a_deadline_once(world: World) -> None:
    tier = filled(world)
    patient, tier._options = tier._options, StoreOptions(deadline_s=0.05, lookup_deadline_s=0.05)
    world.store.gate.clear()
    out = [np.zeros(NUM_BYTES, np.uint8)]
    assert tier.get(KEYS[:1], out) == 0 and tier.contains(KEYS) == 0
    assert tier.stats()["timeouts"] == 2
    assert tier.get(KEYS[:1], out) == 0 and tier.contains(KEYS) == 0
    assert tier.stats()["busy_calls"] == 2  # refused at once: the threads still hang
    world.store.gate.set()
    for lane in tier._lanes.values():
        lane._last.exception(LIMIT_S)
    assert not out[0].any()  # the late answer went into a buffer of the store's call
    tier._options = patient
    assert fetch(tier, KEYS) == len(KEYS)


def test_pages_beyond_the_queue_are_dropped() -> None:
    world = World(put_queue_mb=4 * NUM_BYTES / 2**20)
    try:
        tier = filled(world)
        world.store.gate.clear()
        many = [bytes([n]) * 32 for n in range(20)]
        tier.put(records(many[:1]))
        tier.put(records(many[1:]))
        world.store.gate.set()
        assert tier.flush(LIMIT_S)
        stats = tier.stats()
        assert stats["dropped_pages"] >= 15 and tier.contains(many) >= 4
    finally:
        world.close()


def test_redis_that_is_killed_is_a_miss(tmp_path: Path) -> None:
    with servers.redis_server() as (url, child):
        tier = make_store("redis", {"url": url, "deadline_s": 5}, manifest())
        tier.put(records(KEYS))
        assert tier.flush(LIMIT_S) and tier.contains(KEYS) == fetch(tier, KEYS) == len(KEYS)
        child.kill()
        child.wait(10)
        assert tier.contains(KEYS) == 0 == fetch(tier, KEYS)
        assert tier.stats()["errors"] >= 1
        tier.close()


def test_options_are_checked_by_name(tmp_path: Path) -> None:
    its = manifest()
    with pytest.raises(ConfigError, match=r"choose one of: .*redis"):
        make_store("nothing", None, its)
    with pytest.raises(ConfigError, match=r"unknown field `ulr`.*url"):
        make_store("redis", '{"ulr": "redis://x"}', its)
    with pytest.raises(ConfigError, match="deadline_s"):
        make_store("redis", {"deadline_s": -1}, its)
    with pytest.raises(ConfigError, match="is no object"):
        make_store("redis", "[]", its)
    with pytest.raises(ConfigError, match="not readable"):
        make_store("redis", "{", its)
    with pytest.raises(ConfigError, match="by flag"):
        make_store("dynamic", {"module_path": "os", "class_name": "system"}, its, by_flag=False)
    with pytest.raises(ConfigError, match="lacks the methods open"):
        make_store("dynamic", {"module_path": "os", "class_name": "system"}, its)
    with pytest.raises(ConfigError, match="there is no class"):
        make_store("dynamic", {"module_path": "no.such", "class_name": "Store"}, its)
    with pytest.raises(ConfigError, match="by flag only"):
        read_extra("@/etc/passwd", by_flag=False)
    texts = {"a.json": '{"url": "x", "n": 1}', "a.yaml": "url: x\nn: 1", "a.toml": 'url="x"\nn=1'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read_extra(f"@{tmp_path / name}") == {"url": "x", "n": 1}
    with pytest.raises(ConfigError, match="cannot read"):
        read_extra(f"@{tmp_path}/absent.json")


TILED = "[{l}, *, {h}, 1, 8, 16] torch.bfloat16, [{l}, *, {h}, 16, 8] torch.bfloat16; "
PLAIN = "[{l}, *, 16, {h}, 8] torch.int8, " * 2 + "[{l}, *, 16, {h}] torch.float32; "


@pytest.mark.parametrize(("layout", "item", "tiled"), [(TILED, 2, True), (PLAIN, 1, False)])
def test_servers_of_other_ranks_share_pages(layout: str, item: int, tiled: bool) -> None:
    """A page written by one rank of 8 heads is read by two of 4 heads and by two stages."""
    whole = np.random.default_rng(0).integers(0, 256, (4, 8, 16 * 8 * item), np.uint8)
    scale = whole[:, :, :64]

    def part(layers: slice, heads: slice) -> np.ndarray:
        tensors = [whole[layers, heads], whole[layers, heads] ^ 1]
        if not tiled:  # heads stand behind tokens
            tensors = [
                t.reshape(*t.shape[:2], 16, -1).swapaxes(1, 2)
                for t in (*tensors, scale[layers, heads])
            ]
        return np.concatenate([t.reshape(-1) for t in tensors])

    def tier(first_layer: int, end_layer: int, first_head: int, end_head: int) -> StoreTier:
        sizes = {"l": end_layer - first_layer, "h": end_head - first_head}
        page = part(slice(first_layer, end_layer), slice(first_head, end_head))
        its = manifest(
            layout=layout.format(**sizes),
            page_bytes=(len(page), 0),
            rectangle=Rectangle(0, 1, first_layer, end_layer, first_head, end_head),
        )
        return world.tier(its)

    world = World(head_group=2, layer_group=2)
    try:
        writer = tier(0, 4, 0, 8)
        page = part(slice(0, 4), slice(0, 8))
        writer.put([PageRecord(KEYS[0], bytes(32), np.zeros(PAGE, np.int32), page)])
        assert writer.flush(LIMIT_S)
        assert len(world.store.shared) == 2 * 4
        for area in ((0, 4, 0, 4), (0, 4, 4, 8), (0, 2, 0, 8), (2, 4, 0, 8), (0, 4, 0, 8)):
            expected = part(slice(*area[:2]), slice(*area[2:]))
            out = [np.zeros(len(expected), np.uint8)]
            reader = tier(*area)
            assert reader.contains(KEYS[:2]) == 1 and reader.get(KEYS[:1], out) == 1
            assert np.array_equal(out[0], expected)
        with pytest.raises(ConfigError, match="layer_group 2 must divide 0 and 3"):
            tier(0, 3, 0, 8)
    finally:
        world.close()


def test_pages_without_known_parts_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="leave both out"):
        Grid(manifest(layout="[2, *, 9] torch.bfloat16"), StoreOptions(head_group=2))


def test_files_of_others_links_and_open_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    tier = make_store("shared_file", {"directory": str(folder), "min_free_gb": 0}, manifest())
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S) and fetch(tier, KEYS) == len(KEYS)
    files = sorted(folder.glob("*/*"))
    assert len(files) == len(KEYS)
    assert {f.stat().st_mode & 0o777 for f in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    first = next(f for f in files if f.name.startswith(KEYS[0].hex()[:32]))
    moved = tmp_path / "moved"
    first.rename(moved)
    first.symlink_to(moved)
    assert tier.contains(KEYS) == 0 == fetch(tier, KEYS)
    assert tier.stats()["store_refused"] == 1 and tier.stats()["errors"] == 0
    first.unlink()
    os.mkfifo(first)
    assert fetch(tier, KEYS) == 0
    tier.close()
    folder.chmod(0o777)
    tier = make_store("shared_file", {"directory": str(folder)}, manifest())
    assert fetch(tier, KEYS) == 0 and tier.stats()["errors"] == 1
    tier.close()


def test_the_folder_keeps_its_budget_and_the_pages_used_last(tmp_path: Path) -> None:
    extra = {"directory": str(tmp_path), "min_free_gb": 0, "max_gb": 10 * 3200 / 2**30}
    tmp_path.chmod(0o700)
    tier = make_store("shared_file", extra, manifest())
    many = [bytes([n]) * 32 for n in range(30)]
    for key in many:
        tier.put(records([key]))
        assert tier.flush(LIMIT_S)
        assert fetch(tier, many[:1]) == 1  # used all the time
    sizes = [f.stat().st_size for f in tmp_path.glob("*/*")]
    assert sum(sizes) <= 10 * 3200 and tier.stats()["store_evicted"] >= 20
    assert fetch(tier, many[-3:]) == 3 and fetch(tier, many[5:6]) == 0
    tier.close()


def test_nothing_is_written_to_a_disk_that_is_full(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    extra = {"directory": str(tmp_path), "min_free_gb": 1e9}
    tier = make_store("shared_file", extra, manifest())
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S) and tier.contains(KEYS) == 0
    assert tier.stats()["store_full"] == len(KEYS) and tier.stats()["errors"] == 0
    tier.close()


def test_a_folder_that_others_may_write_to_leaves_no_descriptor_open(tmp_path: Path) -> None:
    store = FileStore(FileOptions(directory=str(tmp_path)), "radixlm1-x")
    (tmp_path / "radixlm1-x").mkdir()
    (tmp_path / "radixlm1-x").chmod(0o777)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TransferError, match="chmod 700"):
            store.open()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("how", ["deleted", "all deleted", "replaced"])
def test_a_shared_folder_that_goes_away_is_opened_again(tmp_path: Path, how: str) -> None:
    root = tmp_path / "pages"
    extra = {"directory": str(root), "min_free_gb": 0}
    tier = make_store("shared_file", extra, manifest())
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S) and fetch(tier, KEYS) == len(KEYS)
    if how == "deleted":
        shutil.rmtree(next(root.iterdir()))
    elif how == "all deleted":
        shutil.rmtree(root)
    else:
        root.rename(tmp_path / "old")
        other = make_store("shared_file", extra, manifest())
        other.put(records(KEYS[:2]))
        assert other.flush(LIMIT_S)
        other.close()
    num_open = len(os.listdir("/proc/self/fd"))
    tier.put(records(KEYS))
    assert tier.flush(LIMIT_S)
    assert len(list(root.glob("*/*"))) == len(KEYS) == tier.contains(KEYS) == fetch(tier, KEYS)
    assert tier.stats()["errors"] == 0 and len(os.listdir("/proc/self/fd")) == num_open
    tier.close()


def test_many_small_objects_are_read_with_few_open_files(tmp_path: Path) -> None:
    store = FileStore(FileOptions(directory=str(tmp_path), min_free_gb=0), "radixlm1-x")
    tmp_path.chmod(0o700)
    store.open()
    names = [f"{number:032x}_L0-1" for number in range(200)]
    store.put(names, [bytes([number]) for number in range(200)])
    buffers = [bytearray(1) for _ in names]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        assert store.get(names, list(map(memoryview, buffers))) == [1] * 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        store.close()
    assert [buffer[0] for buffer in buffers] == list(range(200))


@pytest.mark.parametrize("method", ["exists", "get"])
def test_a_store_that_answers_too_little_is_a_miss(world: World, method: str) -> None:
    tier, more = filled(world), keys_of("other words", manifest())
    answer = getattr(world.store, method)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.store, method, lambda names, *rest: answer(names, *rest)[1:])
        assert 0 in (tier.contains(KEYS), fetch(tier, KEYS))
        tier.put(records(more))
        assert tier.flush(LIMIT_S)
    assert fetch(tier, KEYS) == len(KEYS) and tier.stats()["errors"]
    tier.put(records(more))
    assert tier.flush(LIMIT_S) and fetch(tier, more) == len(more)


def test_a_route_names_no_files() -> None:
    with pytest.raises(ConfigError, match="password_file: a file can be named by flag only"):
        make_store("redis", {"password_file": "/etc/x"}, manifest(), by_flag=False)
