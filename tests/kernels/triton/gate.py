"""Compiles the variants of one module of kernels; one JSON line each. Run as a program."""

from __future__ import annotations

import argparse
import importlib
import json
import time

from radixlm.kernels.triton.variant import Variant, compiled


def representative(variants: tuple[Variant, ...]) -> list[tuple[Variant, int]]:
    """The first and the last variant of each kernel for sm_90, the first for sm_80."""
    by_kernel: dict[int, list[Variant]] = {}
    for variant in variants:
        by_kernel.setdefault(id(variant.kernel), []).append(variant)
    picked = []
    for own in by_kernel.values():
        picked += [(own[0], 90), (own[0], 80)] + ([(own[-1], 90)] if len(own) > 1 else [])
    return picked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    options = parser.parse_args()
    module = importlib.import_module(f"radixlm.kernels.triton.{options.module}")
    announce = getattr(module, "variants", None)
    variants: tuple[Variant, ...] = announce() if announce is not None else ()
    variants = tuple(v for v in variants if options.only in v.name)
    if options.all:
        chosen = [(variant, arch) for variant in variants for arch in (90, 80)]
    else:
        chosen = representative(variants)
    for variant, arch in chosen:
        if arch < variant.min_arch:
            continue
        start = time.monotonic()
        result = compiled(variant, arch)
        row = {
            "name": variant.name,
            "arch": arch,
            "registers": result.registers,
            "spills": result.spills,
            "shared_bytes": result.shared_bytes,
            "has_wgmma": "wgmma.mma_async" in result.ptx,
            "wants_wgmma": variant.wgmma and arch == 90,
            "seconds": round(time.monotonic() - start, 2),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
