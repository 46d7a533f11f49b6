"""Decodes audio files to one channel of samples at the model's sampling rate.

WAV is read by the standard library; soundfile, where it is installed, reads FLAC, OGG and MP3 too.
"""

import io
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.extras import extra

MIN_SECONDS = 0.1
MAX_SECONDS = 1800.0
MAX_CHANNELS = 64
MAX_RATE = 768_000  # samples a second
MAX_SAMPLES = 1 << 27  # of one channel, as stored
_BLOCK_SAMPLES = 1 << 16
BLOCK_S, OVERLAP_S = 60, 1  # seconds resampled at once, and the context on both sides
MAX_BLOCK = 1 << 22  # samples resampled at once
Samples = NDArray[np.float32]


def read_audio(data: bytes, rate: int, where: str) -> Samples:
    """float32 [samples] in -1..1, the mean of the channels, ``rate`` samples a second;
    InvalidRequest for what is no audio file, or too short or long."""
    samples, file_rate = _wave(data, where) if data[:4] == b"RIFF" else _soundfile(data, where)
    seconds = len(samples) / file_rate
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"{where} has {seconds:.3f} s, must be {MIN_SECONDS} to {MAX_SECONDS:g}", where
        )
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)
    return resample(mono, file_rate, rate)


def _wave(data: bytes, where: str) -> tuple[Samples, int]:
    """[samples, channels] and the rate; other encodings than integers are soundfile's."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            _check_size(file.getnframes(), rate, where)
            if not 1 <= width <= 4 or channels > MAX_CHANNELS:
                raise InvalidRequest(f"{where}: {channels} channels of {width} bytes", where)
            raw = file.readframes(file.getnframes())
    except InvalidRequest:
        raise
    except (wave.Error, EOFError, ValueError, RuntimeError):
        return _soundfile(data, where)
    count = len(raw) // (width * channels) * channels
    return _scaled(raw[: count * width], width).reshape(-1, channels), rate


def _scaled(raw: bytes, width: int) -> Samples:
    """Little-endian integers of ``width`` bytes (one byte: unsigned) in -1..1."""
    if width == 1:
        return np.frombuffer(raw, np.uint8).astype(np.float32) / np.float32(128) - 1
    padded = np.zeros((len(raw) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return (padded.view("<i4")[:, 0] / 2**31).astype(np.float32)


def _check_size(num_samples: int, rate: int, where: str) -> None:
    if not 0 < rate <= MAX_RATE or num_samples > rate * MAX_SECONDS:
        raise InvalidRequest(f"{where}: longer than {MAX_SECONDS:g} s", where)


def _soundfile(data: bytes, where: str) -> tuple[Samples, int]:
    soundfile = extra("soundfile", where, "WAV is read; other formats need soundfile on the server")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_size(len(file), file.samplerate, where)
            if len(file) > MAX_SAMPLES or file.channels > MAX_CHANNELS:
                raise InvalidRequest(
                    f"{where} has {len(file)} samples of {file.channels} channels, at most "
                    f"{MAX_SAMPLES} of {MAX_CHANNELS} are read",
                    where,
                )
            return _mixed(file), int(file.samplerate)
    except InvalidRequest:
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{where} is no audio file that can be read: {error}", where) from None


def _mixed(file: Any) -> Samples:
    """[samples, 1], the mean of the channels, block by block: some kilobytes may unpack to
    gigabytes."""
    mono, count = np.empty((len(file), 1), np.float32), 0
    for block in file.blocks(_BLOCK_SAMPLES, dtype="float32", always_2d=True):
        mono[count : count + len(block), 0] = block.mean(1, dtype=np.float32)
        count += len(block)
    return mono[:count]


def resample(samples: Samples, rate: int, new_rate: int) -> Samples:
    """The samples at another rate. Long ones are resampled in blocks with some context, so that
    memory does not grow with the length."""
    block_s = min(BLOCK_S, max(2, MAX_BLOCK // rate))
    block = block_s * rate
    if rate == new_rate or len(samples) <= block:
        return _resampled(samples, rate, new_rate)
    total, parts = round(len(samples) * new_rate / rate), []
    for first in range(0, len(samples), block):
        begin = max(0, first - OVERLAP_S * rate)
        part = _resampled(samples[begin : first + block + OVERLAP_S * rate], rate, new_rate)
        skip, at = (first - begin) // rate * new_rate, first // rate * new_rate
        parts.append(part[skip : skip + min(block_s * new_rate, total - at)])
    return np.concatenate(parts)


def _resampled(samples: Samples, rate: int, new_rate: int) -> Samples:
    """By the spectrum, cut or filled with zeros."""
    count = round(len(samples) * new_rate / rate)
    if rate == new_rate or not count:
        return samples[:count].astype(np.float32)
    # twice as long and mirrored: else the end would ring into the beginning
    mirrored = np.concatenate((samples, samples[::-1]))
    spectrum = np.fft.rfft(mirrored)
    bins = count + 1
    kept = np.zeros(bins, spectrum.dtype)
    kept[: min(bins, len(spectrum))] = spectrum[:bins]
    return (np.fft.irfft(kept, 2 * count)[:count] * (count / len(samples))).astype(np.float32)


def cut(samples: Samples, rate: int, longest_s: float) -> list[tuple[float, Samples]]:
    """Pieces of at most ``longest_s`` seconds and where each begins, in seconds; cut where it is
    quietest within the last sixth of a piece."""
    longest, frame = int(longest_s * rate), max(1, rate // 50)
    pieces, at = [], 0
    while len(samples) - at > longest:
        first = at + longest - longest // 6
        tail = samples[first : at + longest]
        frames = tail[: len(tail) // frame * frame].reshape(-1, frame)
        end = at + longest
        if len(frames):
            power, near = np.square(frames).mean(1), np.ones(min(5, len(frames)))
            loudness = np.convolve(power, near, "same") / np.convolve(power * 0 + 1, near, "same")
            end = first + int(loudness.argmin()) * frame + frame // 2
        pieces.append((at / rate, samples[at:end]))
        at = end
    return [*pieces, (at / rate, samples[at:])]
