"""Decodes video files to frames, by PyAV."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.multimodal import image
from radixlm.multimodal.extras import extra

MAX_FRAMES = 768  # kept of one video: others are left out evenly
MAX_READ = 36_000  # frames decoded
MAX_PIXELS = 1 << 28  # of all kept frames together


class Video(Record):
    """``frames``: uint8 [T, rows, columns, 3], evenly spaced; ``fps`` of these."""

    frames: NDArray[np.uint8]
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """What a processor reads about frames that are sampled already."""
        count = len(self.frames)
        return {
            "total_num_frames": count,
            "fps": self.fps,
            "duration": count / self.fps,
            "frames_indices": list(range(count)),
            "height": self.frames.shape[1],
            "width": self.frames.shape[2],
        }


def read_video(data: bytes, fps: float, where: str, most: int = MAX_FRAMES) -> Video:
    """About ``fps`` frames a second, ``most`` in all; InvalidRequest for what is no video file or
    too large, and where PyAV is not installed."""
    needs = "videos need PyAV on the server (pip install av); send a list of frames"
    av = extra("av", where, needs)
    try:
        with av.open(io.BytesIO(data)) as container:
            return _fewer(_sampled(container, fps, where), most)
    except InvalidRequest:
        raise
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise InvalidRequest(f"{where} is no video file that can be read: {error}", where) from None


def _sampled(container: Any, fps: float, where: str) -> Video:
    stream = container.streams.video[0]
    rate = float(stream.average_rate or 24)
    every = max(1.0, rate / fps)
    frames: list[NDArray[np.uint8]] = []
    for index, frame in enumerate(container.decode(stream)):
        if index >= MAX_READ:
            break
        if frame.width * frame.height > image.MAX_PIXELS:
            raise InvalidRequest(f"{where}: a frame has more than {image.MAX_PIXELS} pixels", where)
        if index >= len(frames) * every:
            frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) * frame.width * frame.height > MAX_PIXELS or len(frames) == MAX_FRAMES:
                frames, every = frames[::2], every * 2
    return make_video(frames, rate / every, where)


def _fewer(video: Video, most: int) -> Video:
    """At most so many frames of it, evenly spaced."""
    count = len(video.frames)
    if count <= most:
        return video
    chosen = np.linspace(0, count - 1, most).round().astype(np.int64)
    return Video(video.frames[chosen], video.fps * most / count)


def read_frames(files: Sequence[bytes], fps: float, where: str, most: int = MAX_FRAMES) -> Video:
    """A video from image files, ``most`` of them; InvalidRequest for what is no image, and
    for too many pixels in all."""
    frames, left = [], MAX_PIXELS
    for data in files:
        frames.append(np.asarray(image.open_image(data, where)))
        left -= frames[-1].shape[0] * frames[-1].shape[1]
        if left < 0:
            raise InvalidRequest(f"{where}: more than {MAX_PIXELS} pixels in all frames", where)
    return _fewer(make_video(frames, fps, where), most)


def make_video(frames: list[NDArray[np.uint8]], fps: float, where: str) -> Video:
    """Of frames, all of the size of the first; InvalidRequest for none."""
    if not frames:
        raise InvalidRequest(f"{where} has no frame", where)
    if any(frame.shape != frames[0].shape for frame in frames):
        raise InvalidRequest(f"{where}: frames differ in size", where)
    return Video(np.stack(frames), fps)
