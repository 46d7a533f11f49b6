"""Encoders of checkpoints that transformers has no class for, built from its layers and a few of
our own. The parameters have the published names.

Legend: N rows of one image, D channels of the decoder, C of the encoder, P a patch's side, S slices
of an image.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.arch.media.layout import CheckpointLayout
from radixlm.base.errors import CheckpointError
from radixlm.models.encoders.dasheng import Dasheng
from radixlm.models.encoders.glm4v import Glm4v
from radixlm.models.encoders.kimi import Kimi, LocateAnything
from radixlm.models.encoders.layout_weights import fill
from radixlm.models.encoders.molmo import Molmo
from radixlm.models.encoders.moondream import Moondream
from radixlm.models.encoders.ovis import Ovis, OvisTiles
from radixlm.models.encoders.patch_rope import rotated, square_places, turns
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report

_HEAD_DIM = 128  # of MiniCPM-V's resampler
_SLOWEST = 10_000.0  # base of its sinusoidal positions


def build(
    name: str, layout: CheckpointLayout, raw: dict[str, Any], folder: Path, dtype: torch.dtype
) -> tuple[nn.Module, int]:
    """The encoders with their weights, and the decoder's width. CheckpointError for a config that
    cannot be understood and for weights that are missing or misshapen."""
    try:
        config = layout.config(raw)
        with torch.device("cpu"):
            module = MODULES[name](config).to(dtype)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"config.json: its encoders cannot be understood: {error}") from error
    report = fill(module, layout, folder, dtype)
    check_report(report, folder, "the encoders")
    check_numbers(module, folder, "the encoders")
    return module, int(config["hidden_size"])


# ---- MiniCPM-V and -o, 2.6 to 4.5 -------------------------------------------------------------


def sines(height: int, width: int, dim: int) -> Tensor:
    """float32 [height * width, dim]: of the column in the first half, of the row in the second;
    in each half all sines, then all cosines."""
    quarter = dim // 4
    speeds = _SLOWEST ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    turns = torch.arange(max(height, width), dtype=torch.float64)[:, None] * speeds
    waves = torch.cat([turns.sin(), turns.cos()], -1).float()
    rows = waves[:height, None].expand(-1, width, -1)
    columns = waves[None, :width].expand(height, -1, -1)
    return torch.cat([columns, rows], -1).reshape(height * width, dim)


def buckets(count: int, side: int) -> Tensor:
    """int64 [count]: the learned position, of ``side``, that each of ``count`` patches has."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count)[:count], bounds, right=True)


class _Patches(nn.Module):
    """Patch embeddings, with positions as fractions of the image's sides."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.patch_size
        self.side = config.image_size // size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, size, size)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """[N, 3, P, P] -> [1, N, C]."""
        rows, columns = buckets(height, self.side), buckets(width, self.side)
        places = (rows[:, None] * self.side + columns).reshape(-1).to(patches.device)
        embedded: Tensor = self.patch_embedding(patches).flatten(1) + self.position_embedding(
            places
        )
        return embedded[None]


class _SiglipSlices(nn.Module):
    """SigLIP on slices of any shape."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.siglip.modeling_siglip import SiglipEncoder  # noqa: PLC0415

        config = SiglipVisionConfig(**values)
        config._attn_implementation = "sdpa"
        self.embeddings = _Patches(config)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """[N, 3, P, P] -> [1, N, C]."""
        encoded = self.encoder(inputs_embeds=self.embeddings(patches, height, width))
        out: Tensor = self.post_layernorm(encoded.last_hidden_state)
        return out


class _Resampler(nn.Module):
    """Learned queries that attend once to a slice's patches."""

    def __init__(self, num_queries: int, dim: int, encoder_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, dim))
        differs = encoder_dim != dim
        self.kv_proj = nn.Linear(encoder_dim, dim, bias=False) if differs else nn.Identity()
        self.attn = nn.MultiheadAttention(dim, dim // _HEAD_DIM, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(dim, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(dim, dim))

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """[1, N, C] -> [num_queries, D]."""
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + sines(height, width, values.shape[-1]).to(values)
        seen, _ = self.attn(self.ln_q(self.query)[None], keys, values, need_weights=False)
        queries: Tensor = self.ln_post(seen[0]) @ self.proj
        return queries


class MiniCpm(nn.Module):
    """SigLIP and a resampler."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vpm = _SiglipSlices(config["vision_config"])
        encoder_dim = config["vision_config"]["hidden_size"]
        self.resampler = _Resampler(config["num_queries"], config["hidden_size"], encoder_dim)

    def get_image_features(self, pixel_values: Tensor, tgt_sizes: Tensor) -> Tensor:
        """[patches of all slices, 3, P, P], int64 [S, 2] rows and columns -> [S * queries, D]."""
        sizes: list[tuple[int, int]] = [(int(h), int(w)) for h, w in tgt_sizes.tolist()]
        slices = torch.split(pixel_values, [height * width for height, width in sizes])
        parts = [
            self.resampler(self.vpm(patches, *size), *size)
            for patches, size in zip(slices, sizes, strict=True)
        ]
        return torch.cat(parts)


# ---- DeepSeek-VL2 ------------------------------------------------------------------------------


class _SiglipTiles(nn.Module):
    """SigLIP on tiles of one size."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.siglip.modeling_siglip import SiglipEncoder  # noqa: PLC0415

        config = SiglipVisionConfig(**values)
        config._attn_implementation = "sdpa"
        size, dim = config.patch_size, config.hidden_size
        self.embedding = nn.Conv2d(3, dim, size, size)
        self.pos_embed = nn.Parameter(torch.zeros(1, (config.image_size // size) ** 2, dim))
        self.encoder = SiglipEncoder(config)
        self.norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)

    def forward(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, C, rows, columns]."""
        grid = self.embedding(tiles)
        rows = grid.flatten(2).transpose(1, 2) + self.pos_embed
        encoded: Tensor = self.norm(self.encoder(inputs_embeds=rows).last_hidden_state)
        return encoded.transpose(1, 2).reshape(grid.shape)


class Deepseek(nn.Module):
    """A whole image and its tiles side by side, with a learned newline after each row and a learned
    separator between the two."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision = _SiglipTiles(config["vision_config"])
        self._merge, self._is_whole_first = config["merge"], config["is_whole_first"]
        dim, inner = config["hidden_size"], config["inner"]
        first = config["vision_config"]["hidden_size"] * self._merge**2
        layers: list[nn.Module] = [nn.Linear(first, inner)]
        for _ in range(config["depth"] - 2):
            layers += [nn.GELU(), nn.Linear(inner, inner)]
        self.projector = nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, dim))
        self.image_newline = nn.Parameter(torch.zeros(dim))
        self.view_seperator = nn.Parameter(torch.zeros(dim))

    def get_image_features(self, pixel_values: Tensor, images_spatial_crop: Tensor) -> Tensor:
        """[all tiles, 3, side, side], int64 [images, 2] columns and rows -> [N, D]."""
        tiles, at, parts = self._projected(pixel_values), 0, []
        for columns, rows in images_spatial_crop.tolist():
            crops = tiles[at + 1 : at + 1 + rows * columns]
            side, dim = crops.shape[1], crops.shape[-1]
            large = crops.reshape(rows, columns, side, side, dim).transpose(1, 2)
            views = [self._ended(tiles[at]), self.view_seperator[None]]
            views.append(self._ended(large.reshape(rows * side, columns * side, dim)))
            parts += views if self._is_whole_first else views[::-1]
            at += 1 + rows * columns
        return torch.cat(parts)

    def _projected(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, rows, columns, D], a square of patches each."""
        grid, merge = self.vision(tiles), self._merge
        odd = -grid.shape[-1] % merge
        grid = nn.functional.pad(grid, (0, odd, 0, odd))
        side = grid.shape[-1] // merge
        squares = nn.functional.unfold(grid, merge, stride=merge).transpose(1, 2)
        projected: Tensor = self.projector(squares)
        return projected.reshape(len(tiles), side, side, -1)

    def _ended(self, grid: Tensor) -> Tensor:
        """[rows, columns, D] -> [rows * (columns + 1), D]."""
        ends = self.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, ends], 1).flatten(0, 1)


# ---- VILA and NVILA-Lite -----------------------------------------------------------------------


class _SiglipEmbeddings(nn.Module):
    """SigLIP without its last layers, on tiles of one size."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.siglip import modeling_siglip as hf  # noqa: PLC0415

        config = SiglipVisionConfig(**values)
        config._attn_implementation = "sdpa"
        self.embeddings = hf.SiglipVisionEmbeddings(config)
        self.encoder = hf.SiglipEncoder(config)

    def forward(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, rows * columns, C]."""
        encoded: Tensor = self.encoder(inputs_embeds=self.embeddings(tiles)).last_hidden_state
        return encoded


class Vila(nn.Module):
    """Projects squares of patches; the first layer has no weights, so that the others have the
    published numbers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_tower = _SiglipEmbeddings(config["vision_config"])
        merge, dim = config["merge"], config["hidden_size"]
        width = config["vision_config"]["hidden_size"]
        self._merge = merge
        wide = width * merge**2
        layers = [nn.Identity(), nn.LayerNorm(wide)]
        if merge == 2:
            layers += [nn.Linear(wide, dim), nn.GELU(), nn.Linear(dim, dim)]
        else:
            layers += [nn.Linear(wide, width * merge), nn.GELU(), nn.LayerNorm(width * merge)]
            layers += [nn.Linear(width * merge, dim), nn.GELU(), nn.Linear(dim, dim)]
        self.projector = nn.Sequential(*layers)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [N, D]."""
        rows, merge = self.vision_tower(pixel_values), self._merge
        side = math.isqrt(rows.shape[1])
        odd = -side % merge
        grid = rows.reshape(len(rows), side, side, -1)
        grid = nn.functional.pad(grid, (0, 0, 0, odd, 0, odd))
        side = (side + odd) // merge
        squares = grid.reshape(len(rows), side, merge, side, merge, -1).transpose(2, 3)
        projected: Tensor = self.projector(squares.flatten(3)).flatten(0, 2)
        return projected


# ---- Phi-3-vision ------------------------------------------------------------------------------


class _ClipPatches(nn.Module):
    """CLIP without its last layers and its class token, on tiles of one size."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.clip import modeling_clip as hf  # noqa: PLC0415

        config = CLIPVisionConfig(**values)
        config._attn_implementation = "sdpa"
        self.embeddings = hf.CLIPVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = hf.CLIPEncoder(config)

    def forward(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, rows * columns, C]."""
        rows = self.pre_layrnorm(self.embeddings(tiles))
        encoded: Tensor = self.encoder(inputs_embeds=rows).last_hidden_state
        return encoded[:, 1:]


class Phi3(nn.Module):
    """The tiles of an image side by side, then the whole image as one tile: squares of four
    patches, with a learned end after each row and a learned separator between the two."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_tower = _ClipPatches(config["vision_config"])
        wide, dim = 4 * config["vision_config"]["hidden_size"], config["hidden_size"]
        self.glb_GN = nn.Parameter(torch.zeros(1, 1, wide))
        self.sub_GN = nn.Parameter(torch.zeros(1, 1, 1, wide))
        self.img_projection = nn.Sequential(nn.Linear(wide, dim), nn.GELU(), nn.Linear(dim, dim))

    def get_image_features(self, pixel_values: Tensor, image_tiles: Tensor) -> Tensor:
        """[all tiles, 3, side, side], int64 [images, 2] rows and columns of tiles -> [N, D]."""
        grids: list[tuple[int, int]] = [(int(h), int(w)) for h, w in image_tiles.tolist()]
        images = torch.split(pixel_values, [rows * columns for rows, columns in grids])
        parts = []
        for tiles, (rows, columns) in zip(images, grids, strict=True):
            side = tiles.shape[-1]
            large = tiles.reshape(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
            large = large.reshape(1, 3, rows * side, columns * side)
            whole = nn.functional.interpolate(large, (side, side), mode="bicubic")
            seen = self.vision_tower(torch.cat([whole, tiles]))
            parts += [self._ended(seen[1:], rows, columns), self.glb_GN[0]]
            parts.append(self._ended(seen[:1], 1, 1))
        projected: Tensor = self.img_projection(torch.cat(parts))
        return projected

    def _ended(self, seen: Tensor, rows: int, columns: int) -> Tensor:
        """[tiles, patches, C] -> [squares and row ends, 4 C]."""
        half = math.isqrt(seen.shape[1]) // 2
        grid = seen.reshape(rows, columns, half, 2, half, 2, -1).permute(0, 2, 1, 4, 3, 5, 6)
        grid = grid.reshape(rows * half, columns * half, -1)
        return torch.cat([grid, self.sub_GN[0, 0].expand(len(grid), 1, -1)], 1).flatten(0, 1)


# ---- dots.ocr ----------------------------------------------------------------------------------


class _DotsBlock(nn.Module):
    """Attention of all patches of an image, then SwiGLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, inner, bias = config["embed_dim"], config["intermediate_size"], config["use_bias"]
        self._heads = config["num_attention_heads"]
        self.norm1, self.norm2 = (nn.RMSNorm(dim, config["rms_norm_eps"]) for _ in range(2))
        parts = {"qkv": nn.Linear(dim, 3 * dim, bias), "proj": nn.Linear(dim, dim, bias)}
        self.attn = nn.ModuleDict(parts)
        layers = {"fc1": (dim, inner), "fc2": (inner, dim), "fc3": (dim, inner)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes, bias) for name, sizes in layers.items()})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, C] of one image; cos and sin [N, channels of a head]."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self._heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        read = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.attn["proj"](read.transpose(0, 1).flatten(1))
        h = self.norm2(x)
        fed: Tensor = self.mlp["fc2"](nn.functional.silu(self.mlp["fc1"](h)) * self.mlp["fc3"](h))
        return x + fed


class _DotsEncoder(nn.Module):
    """Patches of each image in its own size; a square of them makes one row of the decoder."""

    def __init__(self, config: dict[str, Any], dim: int) -> None:
        super().__init__()
        width, size, eps = config["embed_dim"], config["patch_size"], config["rms_norm_eps"]
        self._shape = (config["num_channels"], config["temporal_patch_size"], size, size)
        self._merge = config["spatial_merge_size"]
        self._half = width // config["num_attention_heads"] // 2
        patches = {"proj": nn.Conv2d(self._shape[0], width, size, size)}
        parts = nn.ModuleDict({**patches, "norm": nn.RMSNorm(width, eps)})
        self.patch_embed = nn.ModuleDict({"patchifier": parts})
        self.blocks = nn.ModuleList(_DotsBlock(config) for _ in range(config["num_hidden_layers"]))
        self.post_trunk_norm = nn.RMSNorm(width, eps) if config["post_norm"] else nn.Identity()
        wide = width * self._merge**2
        mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, dim))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(width, eps=1e-6), "mlp": mlp})

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[N, numbers of a patch] -> [N / merge squared, D]."""
        embed: Any = self.patch_embed["patchifier"]
        pixels = patches.reshape(-1, *self._shape)[:, :, 0]
        x = embed["norm"](embed["proj"](pixels).flatten(1))
        cos, sin = turns(square_places(rows, columns, self._merge), self._half, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        normed = self.merger["ln_q"](self.post_trunk_norm(x))
        merged: Tensor = self.merger["mlp"](normed.reshape(-1, x.shape[-1] * self._merge**2))
        return merged


class Dots(nn.Module):
    """The encoder of dots.ocr and dots.vlm1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_tower = _DotsEncoder(config["vision_config"], config["hidden_size"])

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """[patches of all images, numbers of one], int64 [images, 3] -> [N, D]."""
        sizes: list[tuple[int, int, int]] = [(t, h, w) for t, h, w in image_grid_thw.tolist()]
        counts = [height * width for times, height, width in sizes for _ in range(times)]
        grids = [(height, width) for times, height, width in sizes for _ in range(times)]
        parts = torch.split(pixel_values, counts)
        encoded = [self.vision_tower(p, *grid) for p, grid in zip(parts, grids, strict=True)]
        return torch.cat(encoded)


MODULES: dict[str, Any] = {
    "dasheng": Dasheng,
    "dots": Dots,
    "glm4v": Glm4v,
    "minicpm": MiniCpm,
    "molmo": Molmo,
    "kimi": Kimi,
    "locate_anything": LocateAnything,
    "deepseek": Deepseek,
    "vila": Vila,
    "moondream": Moondream,
    "ovis": Ovis,
    "ovis_tiles": OvisTiles,
    "phi3": Phi3,
}
