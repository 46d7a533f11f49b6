"""The encoders of Ovis. The parameters of 2.5 have the published names.

Legend: N patches of an image, C channels of the encoder, D of the decoder.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.models.encoders.patch_rope import rotated, square_places, turns

_NUM_MARKS = 4  # last rows of the vocabulary: begin and end of an image, of a video


class _Block(nn.Module):
    """A layer of SigLIP with rotary positions."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, inner, eps = (config[k] for k in ("hidden_size", "intermediate_size", "eps"))
        self._heads = config["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim, eps=eps) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(dim, dim) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, inner), "fc2": nn.Linear(inner, dim)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, C] of one image; cos and sin [N, channels of a head]."""
        h = self.layer_norm1(x)
        parts = (self.self_attn[f"{one}_proj"](h) for one in "qkv")
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(0, 1) for one in parts)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        read = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.self_attn["out_proj"](read.transpose(0, 1).flatten(1))
        h = self.mlp["fc1"](self.layer_norm2(x))
        fed: Tensor = self.mlp["fc2"](nn.functional.gelu(h, approximate="tanh"))
        return x + fed


class _Siglip(nn.Module):
    """SigLIP 2 on images of any shape, square by square of patches, without its last norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, size = config["hidden_size"], config["patch_size"]
        self._merge, self._side = config["hidden_stride"], config["image_size"] // size
        self._half = dim // config["num_attention_heads"] // 2
        embeddings = {
            "patch_embedding": nn.Conv2d(config["num_channels"], dim, size, size),
            "position_embedding": nn.Embedding(self._side**2, dim),
        }
        self.embeddings = nn.ModuleDict(embeddings)
        layers = nn.ModuleList(_Block(config) for _ in range(config["num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"layers": layers})

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[N, channels, size, size] of one image -> [N, C]."""
        places = square_places(rows, columns, self._merge).to(patches.device)
        table: Any = self.embeddings["position_embedding"]
        grid = table.weight.reshape(1, self._side, self._side, -1).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, (rows, columns), mode="bicubic")[0]
        x: Tensor = self.embeddings["patch_embedding"](patches).flatten(1)
        x = x + grid[:, places[:, 0], places[:, 1]].T
        cos, sin = turns(places, self._half, x)
        blocks: Any = self.encoder["layers"]
        for block in blocks:
            x = block(x, cos, sin)
        return x


class Ovis(nn.Module):
    """Squares of patches become shares of a visual vocabulary, and these a mean of its rows. A row
    of its own begins and ends each image."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vocab, vision = config["visual_vocab_size"], config["vision_config"]
        self._merge = vision["hidden_stride"]
        self.vit = _Siglip(vision)
        words = vocab - _NUM_MARKS
        wide = vision["hidden_size"] * self._merge**2
        self.head = nn.Sequential(nn.Linear(wide, words, bias=False), nn.LayerNorm(words))
        self.vte = nn.Embedding(vocab, config["hidden_size"])

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """[patches of all images, channels, size, size], int64 [images, 3] -> [rows, D]."""
        sizes: list[tuple[int, int]] = [(h, w) for _, h, w in image_grid_thw.tolist()]
        table = self.vte.weight
        begin, end = table[-_NUM_MARKS], table[1 - _NUM_MARKS]
        parts = torch.split(pixel_values, [rows * columns for rows, columns in sizes])
        made = []
        for patches, size in zip(parts, sizes, strict=True):
            squares = self.vit(patches, *size).reshape(len(patches) // self._merge**2, -1)
            shares = self.head(squares).softmax(-1)
            made += [begin[None], shares @ table[:-_NUM_MARKS], end[None]]
        return torch.cat(made)


class _TileEncoder(nn.Module):
    """SigLIP or AIMv2 on tiles of one size, without the last norm."""

    def __init__(self, kind: str, values: dict[str, Any]) -> None:
        super().__init__()
        from transformers import Ovis2VisionConfig, SiglipVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.ovis2 import modeling_ovis2 as aim  # noqa: PLC0415
        from transformers.models.siglip import modeling_siglip as siglip  # noqa: PLC0415

        is_siglip = kind == "siglip_vision_model"
        config: Any = (SiglipVisionConfig if is_siglip else Ovis2VisionConfig)(**values)
        config._attn_implementation = "sdpa"
        parts = (siglip.SiglipVisionEmbeddings, siglip.SiglipEncoder)
        if not is_siglip:
            parts = (aim.Ovis2VisionEmbeddings, aim.Ovis2VisionEncoder)
        self.embeddings, self.encoder = (part(config) for part in parts)

    def forward(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, patches, C]."""
        seen: Tensor = self.encoder(inputs_embeds=self.embeddings(tiles)).last_hidden_state
        return seen


class OvisTiles(nn.Module):
    """Ovis 1.6 and 2: as ``Ovis``, with a row of its own before an image, behind the whole image,
    between the tiles of a row, between the rows, and behind the image."""

    _NUM_MARKS = 5  # last rows of the vocabulary, in this order

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._merge, vocab = config["hidden_stride"], config["visual_vocab_size"]
        self._is_hard = config["tokenize_function"] != "softmax"
        self.vit = _TileEncoder(config["kind"], config["vision_config"])
        words = vocab - self._NUM_MARKS
        wide = config["vision_config"]["hidden_size"] * self._merge**2
        self.head = nn.Sequential(nn.Linear(wide, words, bias=False), nn.LayerNorm(words))
        self.vte = nn.Embedding(vocab, config["hidden_size"])

    def get_image_features(self, pixel_values: Tensor, tile_grid: Tensor) -> Tensor:
        """[all tiles, 3, side, side], int64 [images, 2] rows and columns -> [rows, D]."""
        seen, at, made = self._words(pixel_values), 0, []
        start, prefix, column_end, row_end, end = self.vte.weight[-self._NUM_MARKS :].unsqueeze(1)
        for rows, columns in tile_grid.tolist():
            made += [start, seen[at], prefix]
            at += 1
            for place in range(rows * columns if rows * columns > 1 else 0):
                if place:
                    made.append(column_end if place % columns else row_end)
                made.append(seen[at + place])
            at += rows * columns if rows * columns > 1 else 0
            made.append(end)
        return torch.cat(made)

    def _words(self, tiles: Tensor) -> Tensor:
        """[tiles, 3, side, side] -> [tiles, squares, D]: means of the vocabulary's rows."""
        rows, merge = self.vit(tiles), self._merge
        side = math.isqrt(rows.shape[1])
        odd = -side % merge
        grid = nn.functional.pad(rows.unflatten(1, (side, side)), (0, 0, 0, odd, 0, odd))
        side = (side + odd) // merge
        squares = grid.reshape(len(rows), side, merge, side, merge, -1).transpose(2, 3)
        words = self.head(squares.reshape(len(rows), side * side, -1))
        table = self.vte.weight[: -self._NUM_MARKS]
        return table[words.argmax(-1)] if self._is_hard else words.softmax(-1) @ table
