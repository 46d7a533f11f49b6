"""Media in a conversation, and refused parts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.media import MediaReader, MediaSource, sources_of
from radixlm.entrypoints.native.request import read_generate
from radixlm.multimodal.fetch import FetchRules


class Reader:
    """Replaces MediaReader."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds


def parts(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def found(reader: Any, *content: dict[str, Any]) -> list[tuple[Any, str]]:
    return [(one.value, one.kind) for one in sources_of(parts(*content), reader)]


ALL = Reader("image", "video", "audio")


@pytest.mark.parametrize(
    ("part", "value", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,a"}}, "data:,a", "image"),
        ({"type": "image_url", "image_url": "data:,a"}, "data:,a", "image"),
        ({"type": "input_image", "image_url": "data:,a"}, "data:,a", "image"),
        ({"type": "image", "image": "data:,a"}, "data:,a", "image"),
        ({"type": "video_url", "video_url": {"url": "data:,v"}}, "data:,v", "video"),
        (
            {"type": "video", "video": ["data:,1", {"url": "data:,2"}]},
            ("data:,1", "data:,2"),
            "video",
        ),
        ({"type": "audio_url", "audio_url": {"url": "data:,s"}}, "data:,s", "audio"),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            "QUJD",
            "audio",
        ),
    ],
)
def test_a_part_names_its_media(part: dict[str, Any], value: Any, kind: str) -> None:
    assert found(ALL, {"type": "text", "text": "a"}, part) == [(value, kind)]


@pytest.mark.parametrize(
    ("reader", "part", "why"),
    [
        (None, {"type": "image_url", "image_url": "a"}, "text only"),
        (Reader("image"), {"type": "input_audio", "input_audio": {"data": "a"}}, "text and images"),
        (Reader("audio"), {"type": "image_url", "image_url": "a"}, "text and audio"),
        (ALL, {"type": "input_file", "file": "a"}, "text and .*, not input_file"),
        (ALL, {"type": "input_audio", "input_audio": {"format": "wav"}}, "must hold"),
        (ALL, {"type": "input_audio"}, "must hold"),
        (ALL, {"type": "video_url", "video_url": []}, "must hold"),
        (ALL, {"type": "image_url", "image_url": ["a"]}, "must hold"),
    ],
)
def test_unreadable_parts_are_named(reader: Any, part: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content\[0\].*{why}"):
        found(reader, part)


def test_native_fields_name_media_for_each_prompt() -> None:
    batch = read_generate({"text": ["a", "b"], "audio_data": [["x", "y"], None], "image_data": "z"})
    one = MediaSource("z", "image_data")
    audios = [MediaSource(v, "audio_data", "audio") for v in "xy"]
    assert batch.media == [[one, *audios], [one]]
    video = read_generate({"text": "a", "video_data": [["f1", "f2"]]})
    assert video.media == [[MediaSource(("f1", "f2"), "video_data", "video")]]
    for bad in ({"audio_data": 3}, {"video_data": [[]]}, {"image_data": [["a"]]}):
        with pytest.raises(InvalidRequest, match="must hold URLs"):
            read_generate({"text": "a", **bad})


async def test_media_beyond_the_limit_are_refused_before_they_are_fetched() -> None:
    reader = MediaReader(cast(Any, None), FetchRules(), (1, 0, 1), 10, {"image": 1, "audio": 0})
    sources = [MediaSource("http://10.0.0.1/x.png", f"messages[{i}]") for i in range(2)]
    with pytest.raises(InvalidRequest, match=r"2 image inputs; .* allows 1") as refused:
        await reader.prompt("a", sources, add_special_tokens=False)
    assert refused.value.param == "messages[0]"
