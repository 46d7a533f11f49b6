"""``radixlm compare-dumps A B``: the first tensor that differs between two dumps, and by how much;
``--hf MODEL``: the same against Hugging Face transformers, which runs here.

A step of A is compared with the next step of B that has the same tokens at the same positions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from radixlm.base.errors import ConfigError, reason
from radixlm.base.lazy import require_transformers
from radixlm.base.record import Record
from radixlm.config.verb_parser import VerbParser

Step = dict[str, Tensor]
_ABOUT = ("token_ids", "positions", "query_start", "logits_rows")
_HF_TOLERANCE = 1e-2
_ATTENTION = ("self_attn", "attn", "attention", "linear_attn", "mamba", "mixer")
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


class Difference(Record):
    """Between two tensors. ``relative``: the largest difference over the largest value of the
    second; ``cosine``: the smallest of a row."""

    name: str
    max_abs: float
    relative: float
    cosine: float

    @property
    def line(self) -> str:
        return (
            f"{self.name:<24} max abs {self.max_abs:.3e}  relative {self.relative:.3e}  "
            f"cosine {self.cosine:.7f}"
        )


def difference(name: str, a: Tensor, b: Tensor) -> Difference:
    """Of two tensors of one shape; nan and infinity where only one has them."""
    left, right = a.double(), b.double()
    if torch.equal(left, right):
        return Difference(name, 0.0, 0.0, 1.0)
    max_abs = float((left - right).abs().max())
    rows = left.flatten(1), right.flatten(1)
    cosine = float(torch.nn.functional.cosine_similarity(*rows, dim=1).min())
    return Difference(name, max_abs, max_abs / max(float(right.abs().max()), 1e-30), cosine)


def order(name: str) -> tuple[int, int, int]:
    """In which order a step computes its tensors."""
    if match := re.fullmatch(r"layers\.(\d+)(?:\.(attention|mlp))?", name):
        return 1, int(match[1]), ("attention", "mlp", None).index(match[2])
    return {"embed": 0, "norm": 2, "logits": 3}[name], 0, 0


def differences(a: Step, b: Step) -> list[Difference]:
    """Of the tensors that both steps have, in the order in which they are computed."""
    names = sorted((a.keys() & b.keys()) - {*_ABOUT}, key=order)
    for name in names:
        if a[name].shape != b[name].shape:
            shapes = f"{tuple(a[name].shape)} and {tuple(b[name].shape)}"
            raise ConfigError(f"{name} has the shapes {shapes}: these are dumps of two models")
    return [difference(name, a[name], b[name]) for name in names]


def steps_of(folder: Path) -> list[Path]:
    """The files of a dump: a folder TP0, the one above it, or one file; ConfigError."""
    if folder.is_file():
        return [folder]
    inner = folder / "TP0"
    found = sorted((inner if inner.is_dir() else folder).glob("step-*.safetensors"))
    if not found:
        raise ConfigError(f"{folder} holds no dump; name a folder of step-*.safetensors")
    return found


def _is_same(a: Step, b: Step) -> bool:
    return all(torch.equal(a[name], b[name]) for name in ("token_ids", "positions"))


def _read(path: Path) -> Step:
    try:
        step: Step = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no dump, a step-*.safetensors: {reason(error)}") from error
    return step


def pairs(a: Iterable[Path], b: list[Path]) -> Iterator[tuple[str, Step, Step | None]]:
    """Each step of ``a`` with that of ``b``; None where ``b`` has computed no such step."""
    at = 0
    for path in a:
        step = _read(path)
        for place in range(at, len(b)):
            other = _read(b[place])
            if _is_same(step, other):
                at = place + 1
                yield path.stem, step, other
                break
        else:
            yield path.stem, step, None


class HuggingFace:
    """A checkpoint in transformers. It computes the sequences of a step that begin in the step;
    of others the dump does not hold the tokens before."""

    def __init__(self, model: str, dtype: str) -> None:
        library = require_transformers("hf", "--hf")
        kind = getattr(torch, dtype) if dtype != "auto" else "auto"
        try:
            self._net: Any = library.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--hf {model}: {error}") from error
        count = self._net.config.get_text_config().num_hidden_layers
        lists = (m for m in self._net.modules() if isinstance(m, torch.nn.ModuleList))
        layers = next((found for found in lists if len(found) == count), None)
        if layers is None:
            raise ConfigError(f"--hf {model}: its layers are not found")
        self._found: Step = {}
        layers[0].register_forward_pre_hook(self._note_input, with_kwargs=True)
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(f"layers.{number}"))
            for name, part in layer.named_children():
                kind = "attention" if name in _ATTENTION else "mlp" if name in _MLP else None
                if kind is not None:
                    part.register_forward_hook(self._hook(f"layers.{number}.{kind}"))

    def _note_input(self, module: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self._found["embed"] = x[0].detach().clone()

    def _hook(self, name: str) -> Callable[[Any, Any, Any], None]:
        def note(module: Any, args: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            self._found[name] = y.detach().reshape(-1, y.shape[-1]).clone()

        return note

    @torch.inference_mode()
    def step(self, step: Step) -> tuple[Step, Step]:
        """The rows of ``step`` that can be computed, and what transformers has for them."""
        starts = step["query_start"].tolist()
        rows: list[int] = []
        parts: list[Step] = []
        for begin, end in pairwise(starts):
            if int(step["positions"][begin]):
                continue
            self._found = {}
            out = self._net(step["token_ids"][None, begin:end], output_hidden_states=True)
            norm, logits = out.hidden_states[-1][0], out.logits[0]
            wanted = [r - begin for r in step["logits_rows"].tolist() if begin <= r < end]
            parts.append(self._found | {"norm": norm, "logits": logits[wanted]})
            rows += range(begin, end)
        if not parts:
            return {}, {}
        kept = [i for i, r in enumerate(step["logits_rows"].tolist()) if r in set(rows)]
        names = set.intersection(*(set(part) for part in parts)) & set(step)
        mine = {name: step[name][kept if name == "logits" else rows] for name in names}
        return mine, {name: torch.cat([part[name] for part in parts]) for name in names}


def _parser() -> VerbParser:
    parser = VerbParser("radixlm compare-dumps", __doc__)
    parser.add_argument("a", type=Path, help="folder of --debug-tensor-dump-output-folder")
    parser.add_argument("b", type=Path, nargs="?", help="another one")
    parser.add_argument("--hf", metavar="MODEL", help="compare with transformers instead of B")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "auto"),
                        help="of --hf (default: float32)")  # fmt: skip
    parser.add_argument("--tolerance", type=float, help="relative difference that counts as none "
                        f"(default: 0; {_HF_TOLERANCE:g} with --hf)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="print every tensor of every step")
    return parser


def main(argv: list[str]) -> int:
    """Compare; 0 if no tensor differs, 1 if one does or no step can be compared."""
    args = _parser().parse_args(argv)
    if (args.b is None) == (args.hf is None):
        raise ConfigError("compare-dumps: give two folders, or one and --hf MODEL")
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = 0.0 if args.hf is None else _HF_TOLERANCE
    first, counts, worst = "", [0, 0], Difference("none", 0.0, 0.0, 1.0)
    for name, mine, other in _compared(args):
        if not other:
            counts[1] += 1
            continue
        counts[0] += 1
        for found in differences(mine, other):
            if args.all:
                print(f"{name} {found.line}")
            worst = max(worst, found, key=lambda one: one.relative)
            if not found.relative <= tolerance and not first:
                first = f"first difference: {name} {found.line}"
    print(f"{counts[0]} steps compared, {counts[1]} have no counterpart")
    print(first or f"no difference above {tolerance:g}; largest: {worst.line}")
    return 1 if first or not counts[0] else 0


def _compared(args: argparse.Namespace) -> Iterator[tuple[str, Step, Step | None]]:
    if args.hf is None:
        yield from pairs(steps_of(args.a), steps_of(args.b))
        return
    reference = HuggingFace(args.hf, args.dtype)
    for path in steps_of(args.a):
        yield path.stem, *reference.step(_read(path))
