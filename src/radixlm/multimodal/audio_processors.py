"""Audio processors of our own, where Hugging Face's takes one clip a text or needs a package that
knows the model's chat format."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.json_file import read_object
from radixlm.arch.media.config_json import Raw, flattened
from radixlm.arch.media.layouts.midasheng import encoder_sizes
from radixlm.arch.media.registry import row_of
from radixlm.base.errors import CheckpointError
from radixlm.multimodal.placeholders import check_parts, ids_of

Arrays = dict[str, NDArray[Any]]


class AudioProcessor:
    """Text with audio clips -> token ids and arrays; subclasses have ``read``, ``prompt_text``."""

    audio_token: str  # what stands for an audio clip in a text
    placeholder: str  # the token in each of its positions

    def __init__(self, tokenizer: Any, feature_extractor: Any) -> None:
        """ValueError if the tokenizer lacks the token."""
        self.tokenizer, self.feature_extractor = tokenizer, feature_extractor
        self.audio_token_id = tokenizer.convert_tokens_to_ids(self.placeholder)
        if self.audio_token_id in (None, tokenizer.unk_token_id):
            raise ValueError(f"its tokenizer has no token {self.placeholder!r}")

    @classmethod
    def load(cls, raw: Raw, folder: Path, transformers: Any, tokenizer: Any) -> AudioProcessor:
        """The processor of a checkpoint folder with the config.json ``raw``."""
        return cls(tokenizer, transformers.AutoFeatureExtractor.from_pretrained(folder))

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[NDArray[np.float32]] | None = None,
        add_special_tokens: bool = True,
        return_tensors: str = "np",
        images: Any = None,
    ) -> Arrays:
        """The ids of ``text[0]``, and the arrays of its clip if it has one (``MediaProcessor``
        passes several one by one). ValueError where text and clips do not fit, ImportError for
        images."""
        if images is not None:
            raise ImportError("images of this model need torchvision")
        parts, audios = self._split(text[0]), list(audio or ())
        check_parts(parts, len(audios), "audio clips")
        read = [self.read(audio) for audio in audios]
        texts = [self.prompt_text(count) for _, count in read]
        ids = ids_of(self.tokenizer, parts, texts, add_special_tokens)
        return ids | (read[0][0] if len(read) == 1 else {})

    def _split(self, text: str) -> list[str]:
        return text.split(self.audio_token)

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """The encoder's input arrays, and the number of placeholders."""
        raise NotImplementedError

    def prompt_text(self, num_placeholders: int) -> str:
        """The text with placeholders for a clip."""
        return self.placeholder * num_placeholders


class SingleAudioProcessor(AudioProcessor):
    """A Hugging Face processor that takes one clip a text."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.audio_token = self.placeholder = str(processor.audio_token)
        super().__init__(processor.tokenizer, processor.feature_extractor)

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        outputs = self._processor(text=[self.placeholder], audio=[audio], return_tensors="pt")
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        count = int((arrays.pop("input_ids") == self.audio_token_id).sum())
        arrays.pop("attention_mask", None)
        return arrays, count


class EnclosedAudioProcessor(SingleAudioProcessor):
    """As its base; the processor puts tokens around a clip's placeholders."""

    def prompt_text(self, num_placeholders: int) -> str:
        inside = super().prompt_text(num_placeholders)
        return f"{self._processor.audio_bos_token}{inside}{self._processor.audio_eos_token}"


class VoxtralAudioProcessor(AudioProcessor):
    """Mel bands of whole windows (30 s), each of which the encoder reads by itself."""

    audio_token, placeholder = "[BEGIN_AUDIO][AUDIO]", "[AUDIO]"
    _MERGE = 8  # frames that make one placeholder

    def __init__(self, tokenizer: Any, feature_extractor: Any) -> None:
        super().__init__(tokenizer, feature_extractor)
        self._begin = self.audio_token.removesuffix(self.placeholder)
        if tokenizer.convert_tokens_to_ids(self._begin) in (None, tokenizer.unk_token_id):
            self._begin = ""

    def _split(self, text: str) -> list[str]:
        return re.split(r"(?:\[BEGIN_AUDIO\])?\[AUDIO\]", text)

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """``input_features`` [windows, bands, frames]."""
        extractor = self.feature_extractor
        features = extractor(
            audio, sampling_rate=extractor.sampling_rate, padding=True, truncation=False,
            pad_to_multiple_of=extractor.n_samples, return_tensors="np",
        )["input_features"]  # fmt: skip
        bands = features.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(
            1, 0, 2
        )
        return {"input_features": bands}, bands.shape[0] * extractor.nb_max_frames // self._MERGE

    def prompt_text(self, num_placeholders: int) -> str:
        return self._begin + self.placeholder * num_placeholders


class WhisperAudioProcessor(AudioProcessor):
    """Mel bands of one window (30 s) for an encoder; the token that starts a text stands for them,
    and is put there where the text has none."""

    def __init__(self, tokenizer: Any, feature_extractor: Any, start: int) -> None:
        self.audio_token = self.placeholder = str(tokenizer.convert_ids_to_tokens(start))
        super().__init__(tokenizer, feature_extractor)
        self.window_s = feature_extractor.n_samples / feature_extractor.sampling_rate

    @classmethod
    def load(cls, raw: Raw, folder: Path, transformers: Any, tokenizer: Any) -> AudioProcessor:
        """See AudioProcessor."""
        extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        return cls(tokenizer, extractor, int(flattened(raw)["decoder_start_token_id"]))

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[NDArray[np.float32]] | None = None,
        add_special_tokens: bool = True,
        return_tensors: str = "np",
        images: Any = None,
    ) -> Arrays:
        """As of ``AudioProcessor``, without special tokens: they would be a prompt of their own."""
        whole = text[0] if self.placeholder in text[0] or not audio else self.placeholder + text[0]
        return super().__call__([whole], audio, False, return_tensors, images)

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """``input_features`` [1, bands, frames]."""
        extractor = self.feature_extractor
        if len(audio) > extractor.n_samples:
            longest = f"{self.window_s:g} s; /v1/audio/transcriptions cuts longer ones"
            raise ValueError(f"an audio clip of more than {longest}")
        outputs = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="np")
        return {"input_features": np.asarray(outputs["input_features"])}, 1


class ParakeetAudioProcessor(AudioProcessor):
    """Mel bands; eight frames make one placeholder, between two boundary tokens."""

    audio_token = placeholder = "<so_embedding>"
    _HALVINGS = 3

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """``input_features`` [1, frames, bands] and which frames count."""
        extractor = self.feature_extractor
        outputs = extractor([audio], sampling_rate=extractor.sampling_rate, return_tensors="pt")
        arrays = {
            "input_features": np.asarray(outputs["input_features"]),
            "input_features_mask": np.asarray(outputs["attention_mask"]),
        }
        count = 1 + len(audio) // extractor.hop_length
        for _ in range(self._HALVINGS):
            count = (count - 1) // 2 + 1
        return arrays, max(1, count)

    def prompt_text(self, num_placeholders: int) -> str:
        return f"<so_start>{self.placeholder * num_placeholders}<so_end>"


class GraniteFeatureExtractor:
    """Mel bands as torchaudio makes them: two frames stacked, the loudest 80 dB."""

    def __init__(self, options: Raw) -> None:
        """``options``: preprocessor_config.json."""
        values = {**options, **(options.get("melspec_kwargs") or {})}
        self.sampling_rate = int(values.get("sampling_rate") or values.get("sample_rate") or 16_000)
        self._size, self._hop = int(values.get("n_fft", 512)), int(values.get("hop_length", 160))
        self._width, bands = int(values.get("win_length", 400)), int(values.get("n_mels", 80))
        self.block = int(values.get("projector_window_size", 15))
        self.rows = self.block // int(values.get("projector_downsample_rate", 5))
        self._filters = _triangles(self._size // 2 + 1, bands, self.sampling_rate)

    def __call__(self, audio: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
        """[1, pairs of frames, 2 * bands] and how many rows a projector makes of them."""
        power = _power(audio, self._size, self._hop, self._width)
        bands = np.log10(np.maximum(power @ self._filters, 1e-10))
        bands = np.maximum(bands, bands.max() - 8) / 4 + 1
        pairs = bands[: len(bands) // 2 * 2].reshape(1, -1, 2 * bands.shape[1])
        return pairs.astype(np.float32), -(-pairs.shape[1] // self.block) * self.rows


def _power(audio: NDArray[np.float32], size: int, hop: int, width: int) -> NDArray[np.float64]:
    """[frames, 1 + size / 2]: of frames of ``size`` samples, in whose middle a Hann window is
    ``width`` wide. The first one is centred on the first sample."""
    padded = np.pad(audio.astype(np.float64), size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    window = np.zeros(size)
    first = (size - width) // 2
    angles = 2 * np.pi * np.arange(width) / width
    window[first : first + width] = 0.5 - 0.5 * np.cos(angles)
    return np.asarray(np.abs(np.fft.rfft(frames * window)) ** 2, np.float64)


def _triangles(
    bins: int, bands: int, rate: int, span: tuple[float, float] | None = None
) -> NDArray[np.float64]:
    """[bins, bands]: triangles that are equally wide on the mel scale of HTK, not normed. ``span``
    of frequencies: all where it is None."""
    low, high = (2595 * np.log10(1 + one / 700) for one in span or (0, rate / 2))
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    widths = np.diff(edges)
    distances = edges - np.linspace(0, rate // 2, bins)[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling))


class GraniteAudioProcessor(AudioProcessor):
    """Two mel frames a row, which a projector makes fewer of, block by block."""

    audio_token = placeholder = "<|audio|>"

    @classmethod
    def load(cls, raw: Raw, folder: Path, transformers: Any, tokenizer: Any) -> AudioProcessor:
        """See AudioProcessor."""
        options = read_object(folder / "preprocessor_config.json")
        return cls(tokenizer, GraniteFeatureExtractor(options))

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """``input_features`` [1, rows, bands]."""
        features, num_placeholders = self.feature_extractor(audio)
        return {"input_features": features}, num_placeholders


class DashengFeatureExtractor:
    """Mel bands in decibels, those of the last 120."""

    def __init__(self, sizes: Raw) -> None:
        """``sizes``: of the encoder (``arch/media/layouts/midasheng.py``)."""
        self.sampling_rate = int(sizes["sample_rate"])
        self._size, self._hop = int(sizes["n_fft"]), int(sizes["hop_length"])
        self._width, span = int(sizes["win_length"]), (sizes["f_min"], sizes["f_max"])
        bins, bands = self._size // 2 + 1, int(sizes["n_mels"])
        self._filters = _triangles(bins, bands, self.sampling_rate, span)

    def __call__(self, audio: NDArray[np.float32]) -> NDArray[np.float32]:
        """[1, bands, frames]."""
        power = _power(audio, self._size, self._hop, self._width) @ self._filters
        bands = 10 * np.log10(np.maximum(power, 1e-10))
        return np.asarray(np.maximum(bands, bands.max() - 120).T[None], np.float32)


class DashengAudioProcessor(AudioProcessor):
    """Mel bands of a whole clip; so many patches of frames make one placeholder."""

    audio_token = placeholder = "<|AUDIO|>"

    def __init__(self, tokenizer: Any, feature_extractor: Any, frames: int) -> None:
        """``frames`` make one placeholder."""
        super().__init__(tokenizer, feature_extractor)
        self._frames = frames

    @classmethod
    def load(cls, raw: Raw, folder: Path, transformers: Any, tokenizer: Any) -> AudioProcessor:
        """See AudioProcessor."""
        sizes = encoder_sizes(raw)
        frames = sizes["patch_size"][1] * sizes["subsample_factor"]
        return cls(tokenizer, DashengFeatureExtractor(sizes), frames)

    def read(self, audio: NDArray[np.float32]) -> tuple[Arrays, int]:
        """``input_features`` [1, bands, frames], ``audio_lengths`` [1] in samples. ValueError for a
        clip without a placeholder."""
        bands = self.feature_extractor(audio)
        count = bands.shape[-1] // self._frames
        if not count:
            raise ValueError(f"an audio clip of {len(audio)} samples is too short")
        return {"input_features": bands, "audio_lengths": np.asarray([len(audio)])}, count


PROCESSORS: dict[str, type[AudioProcessor]] = {
    "dasheng": DashengAudioProcessor,
    "voxtral": VoxtralAudioProcessor,
    "whisper": WhisperAudioProcessor,
    "parakeet": ParakeetAudioProcessor,
    "granite": GraniteAudioProcessor,
}

# names of those that call Hugging Face's once a clip
OF_ONE_CLIP = {"single": SingleAudioProcessor, "enclosed": EnclosedAudioProcessor}


def load_audio_processor(raw: Raw, folder: Path, transformers: Any) -> AudioProcessor | None:
    """The processor of a checkpoint that is not Hugging Face's; None for the others.
    CheckpointError where the folder lacks something."""
    row = row_of(raw)
    name = "" if row is None else row.audio_processor
    if name == "parakeet" and importlib.util.find_spec("torchvision") is not None:
        return None  # Hugging Face's processor needs torchvision, and reads images too
    if not name or name in OF_ONE_CLIP:
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return PROCESSORS[name].load(raw, folder, transformers, tokenizer)
    except (KeyError, TypeError, ValueError, OSError, ImportError) as error:
        raise CheckpointError(f"{folder}: its processor cannot be made: {error}") from error


def single_audio_processor(raw: Raw, processor: Any) -> Any:
    """``processor``, called once a clip where it takes no more than one."""
    row = row_of(raw)
    made = None if row is None else OF_ONE_CLIP.get(row.audio_processor)
    return processor if made is None else made(processor)
