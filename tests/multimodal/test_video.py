"""Video frames from a client: one size, within limits."""

from __future__ import annotations

import io

import numpy as np
import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal import video
from radixlm.multimodal.video import read_frames, read_video

Image = pytest.importorskip("PIL.Image")


def png(width: int, height: int, shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def test_frames_keep_their_order() -> None:
    video = read_frames([png(5, 4, shade) for shade in (3, 1, 2)], 2.0, "here")
    assert video.frames.shape == (3, 4, 5, 3) and video.fps == 2.0
    assert video.frames[:, 0, 0, 0].tolist() == [3, 1, 2]
    assert video.frames.dtype == np.uint8


@pytest.mark.parametrize(
    ("most", "kept"), [(4, [0, 1, 2, 3]), (3, [0, 2, 3]), (2, [0, 3]), (1, [0])]
)
def test_more_frames_than_the_server_wants_are_left_out_evenly(most: int, kept: list[int]) -> None:
    video = read_frames([png(4, 4, shade) for shade in range(4)], 2.0, "here", most)
    assert video.frames[:, 0, 0, 0].tolist() == kept
    assert video.fps == 2.0 * most / 4


def test_unreadable_videos_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in ([], [b"no image"], [png(4, 4, 0), png(4, 5, 0)]):
        with pytest.raises(InvalidRequest, match=r"^here"):
            read_frames(files, 2.0, "here")
    with pytest.raises(
        InvalidRequest, match=r"^here"
    ):  # without PyAV, which the message then names too
        read_video(b"no video", 2.0, "here")
    monkeypatch.setattr(video, "MAX_PIXELS", 30)
    with pytest.raises(InvalidRequest, match="more than 30 pixels"):
        read_frames([png(4, 4, 0), png(4, 4, 0)], 2.0, "here")
