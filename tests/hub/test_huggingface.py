"""Models by name: the cache first, then a hub on loopback."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.hub.locate import Wanted, locate_file, locate_model
from tests.fakes.hub import FakeHub, FakeRepo, Fault
from tests.hub.conftest import TINY


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_once_and_then_found_without_a_request(hub: FakeHub) -> None:
    folder = locate_model("org/radix-tiny")
    assert names(folder) == names(TINY)
    assert all((folder / name).read_bytes() == (TINY / name).read_bytes() for name in names(TINY))
    asked = len(hub.requests)
    assert locate_model("org/radix-tiny") == folder and len(hub.requests) == asked


def test_the_cache_is_the_one_of_huggingface_hub(hub: FakeHub) -> None:
    """What we download it finds, and what it has downloaded we find; both without the network."""
    folder = locate_model("org/radix-tiny")
    assert huggingface_hub.snapshot_download(
        "org/radix-tiny", cache_dir=constants.HF_HUB_CACHE, local_files_only=True
    ) == str(folder)
    (cached,) = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert (
        cached.repo_id == "org/radix-tiny"
        and not huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).warnings
    )
    hub.add("org/other", hub.repos["org/radix-tiny"].files("main"))
    theirs = huggingface_hub.snapshot_download("org/other")
    asked = len(hub.requests)
    assert locate_model("org/other") == Path(theirs) and len(hub.requests) == asked


def test_a_dropped_connection_goes_on_where_it_broke(hub: FakeHub) -> None:
    hub.faults["model.safetensors"] = Fault(cut=0.7)
    folder = locate_model("org/radix-tiny")
    whole = (TINY / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == whole
    assert hub.sent["model.safetensors"] == len(whole)  # no byte twice


def test_the_next_run_goes_on_with_a_download_that_gave_up(hub: FakeHub, monkeypatch: Any) -> None:
    hub.faults["model.safetensors"] = Fault(times=1, cut=0.7)
    monkeypatch.setattr("radixlm.hub.fetch.MAX_TRIES", 1)
    with pytest.raises(TransferError, match="start again to go on"):
        locate_model("org/radix-tiny")
    folder = locate_model("org/radix-tiny")
    whole = (TINY / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == whole
    assert hub.sent["model.safetensors"] == len(whole)


def test_a_wrong_hash_is_told_and_the_file_fetched_anew(hub: FakeHub, caplog: Any) -> None:
    hub.faults["model.safetensors"] = Fault(flip=True)
    folder = locate_model("org/radix-tiny")
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert any("fetching it anew" in record.message for record in caplog.records)
    hub.add("org/bad", hub.repos["org/radix-tiny"].files("main") | {"extra.json": b"[1]"})
    hub.faults["extra.json"] = Fault(times=99, flip=True)  # its hash is git's
    with pytest.raises(CheckpointError, match=r"extra\.json: the hash was wrong 3 times"):
        locate_model("org/bad")


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(hub: FakeHub, status: int) -> None:
    hub.faults["info"] = Fault(status=status)
    hub.faults["model.safetensors"] = Fault(times=2, status=status, retry_after="0")
    assert names(locate_model("org/radix-tiny")) == names(TINY)


def test_a_token_is_never_sent_to_the_content_host(hub: FakeHub, monkeypatch: Any) -> None:
    hub.repos["org/radix-tiny"].token = "secret"
    with pytest.raises(ConfigError, match=r"ask for access at .*org/radix-tiny, then set HF_TOKEN"):
        locate_model("org/radix-tiny")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert names(locate_model("org/radix-tiny")) == names(TINY)
    assert not hub.tokens_at_content


def test_a_token_that_is_not_valid_is_told(hub: FakeHub, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "broken")
    with pytest.raises(ConfigError, match=r"the token of HF_TOKEN .* is not valid"):
        locate_model("org/radix-tiny")


def test_one_file_of_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/ids", {"freq/ids.pt": b"ids", "big.bin": b"b"})
    file = locate_file("org/ids/freq/ids.pt", "--flag")
    assert file.read_bytes() == b"ids" and not hub.sent["big.bin"]
    asked = len(hub.requests)
    assert locate_file("org/ids/freq/ids.pt", "--flag") == file and len(hub.requests) == asked
    assert locate_file(str(tmp_path / "x.pt"), "--flag") == tmp_path / "x.pt"


def test_what_is_missing_is_told_offline(hub: FakeHub, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"is not in the cache .* HF_HUB_OFFLINE is set"):
        locate_model("org/radix-tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = locate_model("org/radix-tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="its tokenizer is missing"):
        locate_model("org/radix-tiny")


def test_revisions(hub: FakeHub) -> None:
    repo = hub.add("org/radix-tiny", {"config.json": b"{}", "tokenizer.json": b"{}"}, "old")
    repo.revisions["old"]["model.safetensors"] = b"old"
    assert (locate_model("org/radix-tiny@old") / "model.safetensors").read_bytes() == b"old"
    commit = repo.commit("old")
    wanted = Wanted(revision=commit)
    assert locate_model("org/radix-tiny", wanted) == locate_model("org/radix-tiny@old")
    with pytest.raises(ConfigError, match="no revision 'new'; --revision main works"):
        locate_model("org/radix-tiny", Wanted(revision="new"))


def test_a_repository_that_there_is_not(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="has no such repository, and here is no such folder"):
        locate_model("org/nothing")


def test_no_room_is_told_before(hub: FakeHub, monkeypatch: Any) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("radixlm.hub.fetch.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"9\.6 MiB are to be downloaded .* 1\.0 MiB are free"):
        locate_model("org/radix-tiny")
    assert not hub.sent


def test_a_token_goes_along_to_the_new_name_of_a_repository(hub: FakeHub, monkeypatch: Any) -> None:
    new = hub.repos["org/new"] = hub.repos["org/radix-tiny"]
    new.token = "secret"
    hub.moved["org/radix-tiny"] = "org/new"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert names(locate_model("org/radix-tiny")) == names(TINY)
    assert not hub.tokens_at_content


def test_a_hash_that_is_a_path_is_refused(hub: FakeHub, monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeRepo, "commit", lambda *_: "../../../out")
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./\.\./out' in place of a hash"):
        locate_model("org/radix-tiny")
