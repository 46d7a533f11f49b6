"""The disk tier: what it gives is what was put, after any crash, flipped bit and fault."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixlm.base.errors import ConfigError
from radixlm.tiers.codec import Codec
from radixlm.tiers.files import Files, trusted_folder
from radixlm.tiers.frame import Framer
from radixlm.tiers.segment_store import SegmentStore
from radixlm.tiers.segments import SegmentTier

from .faulty_files import (
    CrashingFiles,
    FullFiles,
    ReadOnlyFiles,
    StuckFiles,
    chain,
    payload,
    records,
)

NBYTES = 2048
IDENTITY = bytes(range(32))


@pytest.fixture
def open_tiers() -> Iterator[list[SegmentTier]]:
    tiers: list[SegmentTier] = []
    yield tiers
    for tier in tiers:
        tier.close()


def _open(folder: Path, tiers: list[SegmentTier], **options: Any) -> SegmentTier:
    options = {"budget_bytes": 1 << 20, "identity": IDENTITY, "codec": Codec()} | options
    tier = SegmentTier(folder, **options)
    tiers.append(tier)
    assert tier.flush()
    return tier


def _got(tier: SegmentTier, keys: list[bytes], nbytes: int = NBYTES) -> int:
    out = [np.zeros(nbytes, np.uint8) for _ in keys]
    count = tier.get(keys, out)
    for number in range(count):
        assert np.array_equal(out[number], payload(number, nbytes)), f"wrong page {number}"
    return count


def _home(folder: Path) -> Path:
    return folder / IDENTITY.hex()[:16]


def test_what_was_used_last_is_known_after_a_restart(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.tiers.segment_store._USED_EVERY", 8)
    keys = chain(40)
    first = _open(tmp_path, open_tiers)
    first.put(records(keys))
    assert first.flush() and first.recent(3) == keys[37:]
    for _ in range(3):  # entered once
        first.used([*keys[4:8], b"x" * 32])
    assert first.flush() and first.recent(5) == [keys[39], *keys[4:8]]
    assert first._store._log.num_entries == 44
    assert _got(first, keys[:2]) == 2  # reading is using
    assert first.flush()
    first.close()
    again = _open(tmp_path, open_tiers)
    assert again.recent(7) == [keys[39], *keys[4:8], *keys[:2]] and len(again.recent(99)) == 40
    follower = _open(tmp_path, open_tiers)
    follower.used(keys[20:24])  # another server writes
    assert follower.flush() and follower.recent(2) == again.recent(2) == keys[:2]
    assert _got(again, keys) == 40


@pytest.mark.parametrize("secret", [b"", b"shared"])
def test_pages_outlive_the_tier(
    tmp_path: Path, open_tiers: list[SegmentTier], secret: bytes
) -> None:
    keys = chain(40)
    first = _open(tmp_path, open_tiers, secret=secret)
    first.put(records(keys))
    assert first.flush() and first.contains(keys) == 40 and _got(first, keys) == 40
    first.put(records(keys))  # it has them
    assert first.flush() and first.stats()["written_pages"] == 40
    first.close()
    again = _open(tmp_path, open_tiers, secret=secret)
    assert again.contains(keys) == 40 and _got(again, keys) == 40
    assert _got(again, keys[:1], NBYTES - 2) == 0  # another length is a miss
    again.close()
    other = _open(tmp_path, open_tiers, secret=b"another")
    assert _got(other, keys) == 0  # and no wrong page


def test_modes_are_private(tmp_path: Path, open_tiers: list[SegmentTier]) -> None:
    tier = _open(tmp_path, open_tiers)
    tier.put(records(chain(3)))
    assert tier.flush()
    assert _home(tmp_path).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in _home(tmp_path).iterdir()} == {0o600}


def _store(folder: Path, files: Files) -> SegmentStore:
    store = SegmentStore(folder, IDENTITY, 1 << 20, files, segment_bytes=4096)
    with suppress(OSError):
        store.open()
    return store


def test_after_a_crash_at_any_byte_no_page_is_wrong(tmp_path: Path) -> None:
    """The write that would exceed the limit is torn, and nothing is written any more."""
    keys, framer, counts = chain(6), Framer(IDENTITY, codec=Codec()), set()
    frames = [framer.pack(record.key, record.payload) for record in records(keys)]
    for limit in [*range(0, 200, 7), *range(200, 14_000, 331)]:
        crashed = _store(tmp_path / str(limit), CrashingFiles(limit))
        for key, frame in zip(keys, frames, strict=True):
            with suppress(OSError):
                crashed.append(key, frame)
                crashed.flush()
        crashed.close()
        again = _store(tmp_path / str(limit), Files())
        counts.add(_num_good(again, framer, keys))
        for key, frame in zip(keys, frames, strict=True):
            if key not in again.index:
                again.append(key, frame)
        again.flush()  # and the folder can be written on
        assert _num_good(again, framer, keys) == 6, limit
        again.close()
    assert counts == set(range(7))


def _num_good(store: SegmentStore, framer: Framer, keys: list[bytes]) -> int:
    """How many pages it gives; each that it has in its index after a crash is whole."""
    out, count = np.zeros(NBYTES, np.uint8), 0
    for number, key in enumerate(keys):
        frame = store.read(key)
        assert (frame is None) == (key not in store.index)
        if frame is not None:
            assert framer.unpack(frame, key, out) == "", number
            assert np.array_equal(out, payload(number)), f"wrong page {number}"
            count += 1
    return count


def test_ten_thousand_flipped_bits_give_no_wrong_page(tmp_path: Path) -> None:
    keys, tiers = chain(12), []
    tier = _open(tmp_path, tiers)
    tier.put(records(keys))
    tier.close()
    store = SegmentStore(_home(tmp_path), IDENTITY, 1 << 20, Files())
    store.open()
    framer, rng, num_misses = Framer(IDENTITY, codec=Codec()), random.Random(0), 0
    out = np.zeros(NBYTES, np.uint8)
    for flip in range(10_000):
        number = flip % 12
        data = bytearray(store.read(keys[number]) or b"")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        fault = framer.unpack(bytes(data), keys[number], out)
        num_misses += bool(fault)
        assert fault or np.array_equal(out, payload(number)), f"wrong page {number}"
    assert num_misses > 7000  # the others were in the padding behind a frame
    store.close()


def test_a_log_with_flipped_bits_gives_no_wrong_page(tmp_path: Path) -> None:
    keys = chain(12)
    tier = _open(tmp_path, [])
    for record in records(keys):
        tier.put([record])
        assert tier.flush()
    tier.close()
    log, rng, counts = _home(tmp_path) / "index.log", random.Random(1), set()
    good = log.read_bytes()
    for _ in range(30):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        log.write_bytes(data)
        damaged = _open(tmp_path, [])
        counts.add(_got(damaged, keys))
        damaged.close()
    assert len(counts) > 5  # cut at the flipped bit, wherever it was


def _got_one(tier: SegmentTier, keys: list[bytes], number: int) -> int:
    out = np.zeros(NBYTES, np.uint8)
    count = tier.get(keys[number : number + 1], [out])
    assert not count or np.array_equal(out, payload(number)), f"wrong page {number}"
    return count


def test_the_budget_holds_and_read_pages_are_moved(
    tmp_path: Path, open_tiers: list[SegmentTier]
) -> None:
    keys = chain(600)
    tier = _open(tmp_path, open_tiers, budget_bytes=1 << 18)
    for number, record in enumerate(records(keys)):
        tier.put([record])
        assert tier.flush() and tier.stats()["bytes"] <= 1 << 18
        if number % 10 == 0:
            assert _got(tier, keys[:1]) == 1, number  # read, so moved from segment to segment
    assert tier.stats()["dropped_segments"] > 3
    on_disk = sum(path.stat().st_size for path in _home(tmp_path).iterdir())
    assert on_disk <= (1 << 18) + 600 * 100
    assert sum(tier.contains([key]) for key in keys) == tier.stats()["pages"] > 50
    tier.close()
    again = _open(tmp_path, open_tiers, budget_bytes=1 << 18)
    assert again.contains(keys[:1]) == 1 and _got_one(again, keys, 599) == 1


def test_the_log_is_rewritten_when_most_of_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.tiers.segment_store._SLACK", 0)
    store = _store(tmp_path, Files())
    store._budget_bytes = 1 << 14
    for key in chain(60):
        store.append(key, bytes(2000))
        store.flush()
    assert (tmp_path / "index.log").stat().st_size < (2.5 * len(store.index) + 10) * 60
    store.close()


def test_truncated_and_foreign_segments_are_misses(
    tmp_path: Path, open_tiers: list[SegmentTier]
) -> None:
    keys = chain(30)
    for damage in ("cut", "foreign", "symlink", "gone", "linked"):
        tier = _open(tmp_path, [])
        tier.put(records(keys))
        tier.close()
        segment = next(_home(tmp_path).glob("seg-*.kv"))
        data = segment.read_bytes()
        outside = tmp_path / "outside"
        outside.write_bytes(data)
        if damage == "cut":
            segment.write_bytes(data[: len(data) // 2])
        elif damage == "foreign":
            segment.write_bytes(b"foreign" + data[7:])
        elif damage == "linked":
            segment.unlink()
            os.link(outside, segment)
        else:
            segment.unlink()
            if damage == "symlink":
                segment.symlink_to(outside)
        again = _open(tmp_path, [])
        assert (0 < _got(again, keys) < 30) if damage == "cut" else _got(again, keys) == 0
        again.clear()
        again.close()
        outside.unlink()


def test_another_models_pages_are_not_found(tmp_path: Path, open_tiers: list[SegmentTier]) -> None:
    keys = chain(3)
    tier = _open(tmp_path, [])
    tier.put(records(keys))
    tier.close()
    theirs = bytes(8) + IDENTITY[8:]
    shutil.copytree(_home(tmp_path), tmp_path / theirs.hex()[:16])  # a hostile copy
    assert _got(_open(tmp_path, open_tiers, identity=theirs), keys) == 0
    same_folder = IDENTITY[:8] + bytes(24)
    assert _got(_open(tmp_path, open_tiers, identity=same_folder), keys) == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_takes_no_pages_but_is_read(
    tmp_path: Path,
    open_tiers: list[SegmentTier],
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    keys = chain(40)
    tier = _open(tmp_path, open_tiers, files=CrashingFiles(20_000, error))
    for record in records(keys):
        tier.put([record])
    assert tier.flush() and tier.stats()["is_off"]
    count = tier.contains(keys)
    assert 0 < count < 40 and _got(tier, keys) == count
    assert caplog.text.count("no longer kept") == 1


def test_a_full_disk_is_tried_again_and_read_meanwhile(
    tmp_path: Path, open_tiers: list[SegmentTier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    files, keys, now_s = FullFiles(), chain(12), [100.0]
    options = {"files": files, "segment_bytes": 8192, "clock": lambda: now_s[0]}
    tier = _open(tmp_path, open_tiers, **options)

    def put(*numbers: int) -> int:
        """How many of all pages it has then."""
        tier.put([records(keys)[number] for number in numbers])
        assert tier.flush()  # a trial
        tier.put([records(keys)[number] for number in numbers])
        assert tier.flush()
        return sum(tier.contains([key]) for key in keys)

    num_kept, trials = put(*range(8)), 0
    assert num_kept == 8
    files.free = -1  # dropping a segment does not help either
    num_kept = put(8)
    assert 4 <= num_kept < 8 and tier.stats()["is_off"]
    for pause_s in (10, 20, 40, 60, 60):
        now_s[0] += pause_s - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tier._store, "reopen", lambda: pytest.fail("tried too early"))
            assert put(8) == num_kept
        now_s[0] += 1
        trials += tier._writes._open_until <= now_s[0]
        assert put(8) == num_kept and tier.stats()["is_off"]
    assert trials == 5
    assert _got_one(tier, keys, 7) == 1
    files.free = 1 << 40
    now_s[0] += 60
    assert put(8, 9) == num_kept + 2 and not tier.stats()["is_off"]
    assert caplog.text.count("no longer kept") == caplog.text.count("kept there again") == 1


def test_a_full_disk_gives_back_room_without_any(tmp_path: Path) -> None:
    """No byte can be written any more, not even that a segment is gone."""
    files, keys = FullFiles(), chain(8)
    store = SegmentStore(tmp_path / "x", IDENTITY, 1 << 20, files, segment_bytes=4096)
    store.open()
    for key in keys[:4]:
        store.append(key, b"z" * 2000)
    store.flush()
    store.append(keys[4], b"z" * 2000)
    files.free = -1
    assert store.read(keys[0]) and len(store.sizes) == 5  # so it is open
    reader = store._readers[1]
    store.drop_oldest()
    assert os.fstat(reader).st_size == 0 and len(store.sizes) == 4
    files.free = 1 << 40
    store.flush()
    assert keys[4] in store.index and keys[0] not in store.index
    store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_reads_that_fail_are_tried_again(
    tmp_path: Path, open_tiers: list[SegmentTier], caplog: pytest.LogCaptureFixture, error: int
) -> None:
    files, keys, now_s = FullFiles(), chain(8), [0.0]
    tier = _open(tmp_path, open_tiers, files=files, clock=lambda: now_s[0])
    tier.put(records(keys))
    assert tier.flush() and _got_one(tier, keys, 7) == 1
    files.read_error = error
    assert [_got_one(tier, keys, number) for number in range(6)] == [0] * 6
    assert tier.stats()["errors"] == 5 and not tier.stats()["is_off"]
    assert tier.contains(keys[7:]) == 0 == _got_one(tier, keys, 7)
    files.read_error = 0
    now_s[0] = 10.0
    assert tier.flush() and tier.contains(keys[7:]) == 1 == _got_one(tier, keys, 7)
    assert tier.contains(keys[:1]) == (error != errno.EIO)  # that place of the disk is damaged
    assert caplog.text.count("cannot read a page") == 1


def test_no_descriptor_for_a_new_segment_costs_no_pages(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now_s = chain(8), [0.0]
    tier = _open(tmp_path, open_tiers, segment_bytes=8192, clock=lambda: now_s[0])
    tier.put(records(keys[:4]))
    assert tier.flush() and tier.contains(keys) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._store._files, "open", _no_descriptor)
        tier.put(records(keys))
        assert tier.flush() and tier.stats()["is_off"]
        count = tier.contains(keys)
    assert count >= 4 and tier.stats()["dropped_segments"] == 0
    now_s[0] = 10.0
    tier.put(records(keys))
    assert tier.flush()
    tier.put(records(keys))
    assert tier.flush() and _got(tier, keys) == 8


def _no_descriptor(path: Path, flags: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_disk_that_others_fill_keeps_its_free_bytes(
    tmp_path: Path, open_tiers: list[SegmentTier]
) -> None:
    files = FullFiles()
    tier = _open(tmp_path, open_tiers, files=files, segment_bytes=8192, min_free_bytes=1 << 16)
    tier.put(records(chain(40)))
    assert tier.flush()
    segments = tier.stats()["segments"]
    files.free = 0
    tier.put(records(chain(20, b"other")))
    assert tier.flush() and tier.stats()["segments"] < segments
    assert not tier.stats()["is_off"]


def test_a_disk_that_is_filled_at_once_gives_back_many_segments(tmp_path: Path) -> None:
    files = FullFiles()
    store = SegmentStore(tmp_path / "x", IDENTITY, 1 << 24, files, segment_bytes=2048)
    store.open()
    keys = chain(1000)
    for key in keys:
        store.append(key, b"z" * 400)
    store.flush()
    store.used(keys)
    assert len(store.sizes) > 300
    files.free = 0
    for key in chain(4, b"more"):
        store.append(key, b"z" * 400)
    assert len(store.sizes) == 1
    store.close()


@pytest.mark.parametrize("segment_bytes", [8192, 1 << 20])
def test_a_folder_that_goes_away_is_made_again(
    tmp_path: Path,
    open_tiers: list[SegmentTier],
    caplog: pytest.LogCaptureFixture,
    segment_bytes: int,
) -> None:
    keys, now_s = chain(30), [0.0]
    tier = _open(tmp_path, open_tiers, segment_bytes=segment_bytes, clock=lambda: now_s[0])
    tier.put(records(keys[:10]))
    assert tier.flush() and _got(tier, keys[:10]) == 10
    shutil.rmtree(_home(tmp_path))
    tier.put(records(keys)[10:])
    assert tier.flush() and tier.stats()["is_off"] and tier.contains(keys) == 0
    assert caplog.text.count("no longer kept") == 1
    now_s[0] = 10.0
    assert tier.contains(keys) == 0 and tier.flush() and not tier.stats()["is_off"]
    tier.put(records(keys))
    assert tier.flush() and _got(tier, keys) == 30
    assert _home(tmp_path).stat().st_mode & 0o777 == 0o700
    tier.close()
    assert _got(_open(tmp_path, open_tiers), keys) == 30


def test_nobody_waits_for_a_slow_disk(tmp_path: Path, open_tiers: list[SegmentTier]) -> None:
    keys, files = chain(20), StuckFiles()
    tier = _open(tmp_path, open_tiers, files=files, stall_s=0.05)
    tier.put(records(keys))
    assert tier.flush() and _got(tier, keys[:2]) == 2
    files.stick = True
    start_s = time.monotonic()
    assert tier.get(keys, [np.zeros(NBYTES, np.uint8) for _ in keys]) == 0
    assert tier.contains(keys) == 0  # nobody asks while it hangs
    assert time.monotonic() - start_s < 5 and tier.stats()["late_reads"] == 1
    files.stick = False
    files.go.set()
    assert tier._reader.drain(10)
    assert _got(tier, keys) == 20


def test_wall_clock_jumps_change_nothing(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now = chain(20), [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tier = _open(tmp_path, open_tiers)
    for number, record in enumerate(records(keys)):
        now[0] += (-1) ** number * 1e7
        tier.put([record])
    assert tier.flush() and _got(tier, keys) == 20


def test_a_second_server_reads_and_takes_over(
    tmp_path: Path, open_tiers: list[SegmentTier], caplog: pytest.LogCaptureFixture
) -> None:
    keys = chain(10)
    first = _open(tmp_path, open_tiers)
    first.put(records(keys[:5]))
    assert first.flush()
    second = _open(tmp_path, open_tiers)
    assert not second.stats()["is_writer"] and "another server writes" in caplog.text
    assert _got(second, keys) == 5
    second.put(records(keys))  # not added
    assert second.flush() and first.contains(keys) == 5
    first.put(records(keys)[:7])
    assert first.flush()
    second._followed_s = float("-inf")
    assert second.contains(keys) == 5 and second.flush() and second.contains(keys) == 7
    first.close()
    second._followed_s = float("-inf")
    second.put([])
    assert second.flush() and second.stats()["is_writer"]
    second.put(records(keys))
    assert second.flush() and _got(second, keys) == 10


def test_a_follower_sees_a_log_that_was_cleared(
    tmp_path: Path, open_tiers: list[SegmentTier]
) -> None:
    keys = chain(5)
    first = _open(tmp_path, open_tiers)
    first.put(records(keys))
    assert first.flush()
    second = _open(tmp_path, open_tiers)
    first.clear()
    assert first.contains(keys) == 0 and _got(second, keys) in (0, 5)
    second._followed_s = float("-inf")
    second.put([])
    assert second.flush() and second.contains(keys) == 0


def test_a_follower_that_forgets_all_leaves_the_log_alone(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.tiers.segment_store._SLACK", 0)
    keys = chain(5)
    first = _open(tmp_path, open_tiers)
    first.put(records(keys))
    assert first.flush()
    second = _open(tmp_path, open_tiers)
    second.clear()
    second.close()
    first.close()
    assert _got(_open(tmp_path, open_tiers), keys) == 5


def test_folders_of_older_models_make_room(tmp_path: Path, open_tiers: list[SegmentTier]) -> None:
    for number in range(3):
        tier = _open(tmp_path, [], identity=bytes([number]) * 32)
        tier.put(records(chain(30)))
        tier.close()
        os.utime(tmp_path / (bytes([number]) * 8).hex() / "index.log", (number, number))
    (tmp_path / "notes").mkdir()
    _open(tmp_path, open_tiers, budget_bytes=100_000)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"notes", (b"\2" * 8).hex(), _home(tmp_path).name} <= left
    assert (b"\0" * 8).hex() not in left


def test_only_folders_of_this_user_are_trusted(tmp_path: Path) -> None:
    folder = trusted_folder(tmp_path / "new" / "folder", "--flag")
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("")
    for name in ("link", "file", "file/below"):
        with pytest.raises(ConfigError, match=r"--flag .*a folder of this user works"):
            trusted_folder(tmp_path / name, "--flag")
    if os.geteuid() == 0:
        os.chown(folder, 1, 1)
        with pytest.raises(ConfigError, match="another user's"):
            trusted_folder(folder, "--flag")


def test_a_folder_that_was_good_may_fail_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may do anything
    with pytest.raises(ConfigError, match="it cannot be written"):
        trusted_folder(tmp_path, "--flag")
    assert trusted_folder(tmp_path, "--flag", was_good=True) == tmp_path
    (tmp_path / "file").write_text("")
    gone = tmp_path / "file" / "below"
    assert trusted_folder(gone, "--flag", was_good=True) == gone
    with pytest.raises(ConfigError, match="a symlink, or another user's"):
        trusted_folder(tmp_path / "file", "--flag", was_good=True)


def test_pages_of_a_read_only_disk_are_read(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(12)
    before = _open(tmp_path, [])
    before.put(records(keys[:10]))
    before.close()
    files, now_s = ReadOnlyFiles(), [0.0]
    monkeypatch.setattr(Path, "chmod", ReadOnlyFiles.open)  # of a folder that is as it should be
    tier = _open(tmp_path, open_tiers, files=files, clock=lambda: now_s[0])
    tier.put(records(keys))
    assert tier.stats()["is_off"] and tier.contains(keys) == 10 == _got(tier, keys[:10])
    files.is_writable, now_s[0] = True, 60.0
    for _ in range(2):  # the first finds that it can be written
        tier.put(records(keys))
        assert tier.flush()
    assert not tier.stats()["is_off"] and _got(tier, keys) == 12


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        Files().open(tmp_path / "pipe", os.O_RDWR)


def test_what_the_host_tier_compressed_is_not_compressed_again(
    tmp_path: Path, open_tiers: list[SegmentTier]
) -> None:
    packed: list[bytes] = []
    tier = _open(tmp_path, open_tiers, on_packed=lambda key, flags, blob: packed.append(key))
    tier.put(records(chain(2)))
    assert tier.flush()
    assert packed == (chain(2) if Codec().encode(payload(0))[0] else [])


@pytest.mark.parametrize("suffix", [".kv", ".log"])
def test_files_that_go_away_while_they_are_listed(
    suffix: str, tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of this folder, and the log of another model's, whose servers delete them."""
    first, keys = _open(tmp_path, open_tiers), chain(4)
    first.put(records(keys))
    assert first.flush()
    first.close()
    is_file = Path.is_file

    def last_seen(path: Path) -> bool:
        found = is_file(path)
        if path.suffix == suffix:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", last_seen)
    identity = IDENTITY if suffix == ".kv" else IDENTITY[::-1]
    second = _open(tmp_path, open_tiers, identity=identity)
    assert not second.stats()["is_off"]


def test_what_waits_is_written_before_the_end(
    tmp_path: Path, open_tiers: list[SegmentTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys, gate = _open(tmp_path, open_tiers), chain(20), threading.Event()
    tier._writer.submit(lambda: gate.wait(10) and None)
    tier.put(records(keys))
    drain = tier._writer.drain

    def last_moment(limit_s: float) -> bool:
        gate.set()
        return drain(limit_s)

    monkeypatch.setattr(tier._writer, "drain", last_moment)
    tier.close()
    assert _open(tmp_path, open_tiers).contains(keys) == 20
