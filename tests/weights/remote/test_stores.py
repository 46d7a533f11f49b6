"""Models in S3 and Redis, from real servers: the same bits as from the folder."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from tests.tiers.stores.servers import redis_server, s3_server
from tests.weights.remote.conftest import assert_same, packed, read_all

from radixlm.base.errors import CheckpointError
from radixlm.hub.locate import Wanted, locate_model
from radixlm.weights.remote.place import read_place
from radixlm.weights.remote.redis import RedisReader
from radixlm.weights.remote.s3 import S3Reader
from radixlm.weights.remote.source import RemoteSource

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environ:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            environ.setenv(name, value)
        with s3_server() as url:
            environ.setenv("AWS_ENDPOINT_URL", url)
            yield url


@pytest.fixture
def bucket(endpoint: str) -> Iterator[Any]:
    """boto3's client of a server with an empty bucket "pages"."""
    import boto3

    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket="pages").get("Contents", ()):
        client.delete_object(Bucket="pages", Key=item["Key"])
    yield client
    client.close()


def upload(bucket: Any, folder: Path, prefix: str = "models/tiny/", **options: Any) -> None:
    for file in sorted(folder.iterdir()):
        bucket.put_object(Bucket="pages", Key=prefix + file.name, Body=file.read_bytes(), **options)


def test_s3_gives_the_same_bits(bucket: Any, folder: Path, cache: Path) -> None:
    upload(bucket, folder)
    place = locate_model("s3://pages/models/tiny")
    assert packed(place, "remote") == packed(folder, "auto")
    assert place.parent == cache
    assert not list(place.glob("*.safetensors"))
    assert (place / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    [weights] = read_place(place).files
    etag = bucket.head_object(Bucket="pages", Key=f"models/tiny/{FILE}")["ETag"]
    assert (weights.name, weights.tag) == (FILE, etag)
    assert locate_model("s3://pages/models/tiny/") == place  # nothing has changed


def test_another_version_has_a_folder_of_its_own(bucket: Any, folder: Path, cache: Path) -> None:
    upload(bucket, folder)
    first = locate_model("s3://pages/models/tiny")
    bucket.put_object(Bucket="pages", Key="models/tiny/config.json", Body=b"{}")
    assert locate_model("s3://pages/models/tiny") != first
    assert (first / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_s3s_sha256_is_checked(
    bucket: Any, folder: Path, opened: Callable[..., Any], cache: Path
) -> None:
    upload(bucket, folder, ChecksumAlgorithm="SHA256")
    [weights] = read_place(locate_model("s3://pages/models/tiny")).files
    assert weights.sha256 == hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    reader = opened(S3Reader, "s3://pages/models/tiny")
    assert_same(read_all(RemoteSource(reader, [weights], folder)), folder)


def test_an_object_that_changes_is_refused(
    bucket: Any, folder: Path, opened: Callable[..., Any]
) -> None:
    upload(bucket, folder)
    reader = opened(S3Reader, "s3://pages/models/tiny")
    files = [file for file in reader.files() if file.name == FILE]
    source = RemoteSource(reader, files, folder)
    data = bytearray((folder / FILE).read_bytes())
    data[-1] ^= 1
    bucket.put_object(Bucket="pages", Key=f"models/tiny/{FILE}", Body=bytes(data))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_all(source)
    source.close()


def test_s3_names_what_is_absent(
    bucket: Any, opened: Callable[..., Any], folder: Path, cache: Path
) -> None:
    with pytest.raises(CheckpointError, match="s3://pages/other: no object has this prefix"):
        locate_model("s3://pages/other")
    with pytest.raises(CheckpointError, match="s3://no-such-bucket/x: NoSuchBucket"):
        locate_model("s3://no-such-bucket/x")
    bucket.put_object(Bucket="pages", Key="models/tar/model.tar.gz", Body=b"...")
    with pytest.raises(Exception, match=r"unpack it \(tar xf\)"):
        locate_model("s3://pages/models/tar")


def test_a_dead_s3_server_is_given_up(
    opened: Callable[..., Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="given up after 5 attempts"):
        opened(S3Reader, "s3://pages/models").files()


def test_a_multipart_checksum_is_not_taken_for_a_digest(opened: Callable[..., Any]) -> None:
    class Client:
        def head_object(self, **_: Any) -> dict[str, str]:
            return {"ChecksumSHA256": base64.b64encode(bytes(32)).decode() + "-3"}

        def close(self) -> None: ...

    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("AWS_DEFAULT_REGION", "us-east-1")
        reader = opened(S3Reader, "s3://pages/models")
    reader._client.close()
    reader._client = Client()
    from radixlm.weights.remote.reader import RemoteFile

    assert reader.with_digest(RemoteFile("a", 1, "tag")).sha256 == ""


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as (url, _):
        yield url.rsplit("/", 1)[0]


@pytest.fixture
def database(redis_url: str) -> Iterator[Any]:
    redis = pytest.importorskip("redis", reason="redis is not installed (radixlm[redis])")
    client = redis.Redis.from_url(f"{redis_url}/3")
    client.flushdb()
    yield client
    client.close()


def fill(database: Any, folder: Path, by_tensor: bool) -> None:
    """As SGLang's connector writes a model: files, and a key for each tensor."""
    for file in folder.iterdir():
        if file.name != FILE or not by_tensor:
            database.set(f"team/tiny/files/{file.name}", file.read_bytes())
    for name, tensor in load_file(folder / FILE).items() if by_tensor else ():
        database.set(f"team/tiny/keys/rank_0/{name}", save({"tensor_bytes": tensor}))


@pytest.mark.parametrize("by_tensor", [True, False])
def test_redis_gives_the_same_bits(
    database: Any, redis_url: str, folder: Path, cache: Path, by_tensor: bool
) -> None:
    fill(database, folder, by_tensor)
    place = locate_model(f"{redis_url}/3/team/tiny")
    assert packed(place, "remote") == packed(folder, "auto")
    assert not list(place.glob("*.safetensors"))


def test_a_redis_key_that_changes_is_found_in_the_end(
    database: Any, redis_url: str, folder: Path, cache: Path, opened: Callable[..., Any]
) -> None:
    fill(database, folder, True)
    place = read_place(locate_model(f"{redis_url}/3/team/tiny"))
    reader = opened(RedisReader, place.url)
    source = RemoteSource(reader, place.files, folder)
    key = f"team/tiny/{place.files[0].name}"
    data = bytearray(database.get(key))
    data[-1] ^= 1
    database.set(key, bytes(data))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_all(source)
    database.delete(key)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        source.read(place.files[0].tensor)
    source.close()


def test_redis_names_what_is_wrong(
    database: Any, redis_url: str, folder: Path, cache: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"no keys team/tiny/files/\*"):
        locate_model(f"{redis_url}/3/team/tiny")
    fill(database, folder, True)
    database.set("team/tiny/keys/rank_1/x", b"")
    with pytest.raises(CheckpointError, match="was saved by 2 ranks"):
        locate_model(f"{redis_url}/3/team/tiny")
    database.delete("team/tiny/keys/rank_1/x")
    database.set("team/tiny/keys/rank_0/x", save({name: torch.zeros(1) for name in "ab"}))
    place = locate_model(f"{redis_url}/3/team/tiny")
    with pytest.raises(CheckpointError, match="2 tensors, expected one"):
        packed(place, "remote")


def test_a_dead_redis_server_is_given_up(opened: Callable[..., Any]) -> None:
    pytest.importorskip("redis", reason="redis is not installed (radixlm[redis])")
    with pytest.raises(CheckpointError, match="given up after 5 attempts"):
        opened(RedisReader, "redis://127.0.0.1:9/model").files()
    with pytest.raises(Exception, match="expected redis://host:port/name"):
        opened(RedisReader, "redis://127.0.0.1:9/")


def test_a_tokenizer_alone_has_no_weights(bucket: Any, folder: Path, cache: Path) -> None:
    upload(bucket, folder)
    place = locate_model("s3://pages/models/tiny", Wanted("tokenizer", "--tokenizer-path"))
    assert (place / "tokenizer.json").is_file()
    assert not list(place.glob("*.safetensors"))
    assert not (place / "weights.remote").exists()
