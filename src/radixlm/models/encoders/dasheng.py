"""The audio encoder of MiDashengLM. The parameters have the published names.

Legend: B mel bands, T frames, N patches of a clip, C channels of the encoder, D of the decoder.
"""

from typing import Any

import torch
from torch import Tensor, nn

_MASKED = -10_000.0  # added to the scores of patches behind the clip


class _Scale(nn.Module):
    """A factor of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Block(nn.Module):
    """A transformer's layer with norms before its parts."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, self._heads = sizes["embed_dim"], sizes["num_heads"]
        inner, bias = int(width * sizes["mlp_ratio"]), bool(sizes["qkv_bias"])
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        parts = {"qkv": nn.Linear(width, 3 * width, bias), "proj": nn.Linear(width, width)}
        self.attn = nn.ModuleDict(parts)
        layers = {"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)}
        self.mlp = nn.ModuleDict(layers)
        has_scales = bool(sizes["init_values"])
        self.ls1, self.ls2 = (_Scale(width) if has_scales else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[N, C]; ``bias`` of the scores, [N]."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self._heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
        read = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.expand(len(x), -1)
        )
        x = x + self.ls1(self.attn["proj"](read[0].transpose(0, 1).flatten(1)))
        fed = self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))
        out: Tensor = x + self.ls2(fed)
        return out


class _Encoder(nn.Module):
    """Patches of all bands and a few frames; each stretch of the clip is read by itself."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, patch = sizes["embed_dim"], sizes["patch_size"]
        places = sizes["target_length"] // patch[1]
        # both count four frames a patch
        self._stretch, self._samples = sizes["target_length"] // 4, 4 * sizes["hop_length"]
        self.init_bn = nn.BatchNorm2d(sizes["n_mels"])
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, width, patch, patch)})
        self.time_pos_embed = nn.Parameter(torch.zeros(1, width, 1, places))
        self.freq_pos_embed = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes["depth"]))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, bands: Tensor, length: int) -> Tensor:
        """[1, B, T] of a clip of so many samples -> [N, C]."""
        normed = self.init_bn(bands[..., None]).permute(0, 3, 1, 2)
        patches = self.patch_embed["proj"](normed) + self.freq_pos_embed
        count = patches.shape[-1]
        heard = torch.arange(count, device=bands.device) < length // self._samples
        bias = torch.where(heard, 0.0, _MASKED).to(patches.dtype)
        made = []
        for part, own in zip(
            torch.split(patches, self._stretch, -1), torch.split(bias, self._stretch), strict=True
        ):
            x = (part + self.time_pos_embed[..., : part.shape[-1]])[0, :, 0].T
            for block in self.blocks:
                x = block(x, own)
            made.append(self.norm(x))
        return torch.cat(made)


class Dasheng(nn.Module):
    """Several patches side by side are projected to one row."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.audio_encoder = _Encoder(config)
        self._count, dim = config["subsample_factor"], config["hidden_size"]
        wide = config["embed_dim"] * self._count
        net = nn.Sequential(nn.Linear(wide, dim, False), nn.GELU(), nn.Linear(dim, dim, False))
        self.audio_projector = nn.ModuleDict({"net": net})

    def get_audio_features(self, input_features: Tensor, audio_lengths: Tensor) -> Tensor:
        """[1, B, T] of a clip, int64 [1] its samples -> [rows, D]; what is left over is dropped."""
        seen = self.audio_encoder(input_features, int(audio_lengths[0]))
        seen = seen[: len(seen) // self._count * self._count]
        rows: Tensor = self.audio_projector["net"](seen.reshape(-1, seen.shape[1] * self._count))
        return rows
