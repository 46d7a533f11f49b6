"""Embedding throughput beside sentence-transformers: same model, same texts, in turn.

    PYTHONPATH=src python bench/embeddings.py --peer-python PYTHON [--shape minilm]
        [--dtype float32] [--counts 1,32,256] [--repeats 3]

PYTHON has sentence-transformers and torch. The model is a BERT of random weights with a vocabulary
of its own; texts have 3 to 250 tokens, most of them few. Each engine runs in its own process, gets
all texts of a count in one call and tokenizes them itself. Each count runs at least ``--repeats``
times and for half a second, after one call that is not timed. Prints texts and tokens per second
(medians), the ratio, and how far the vectors are apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 20_000
LEAST_S = 0.5


def make_model(folder: Path, shape: str, dtype: str) -> None:
    """A checkpoint of sentence-transformers: BERT, mean pooling, unit length."""
    import torch  # noqa: PLC0415
    from transformers import BertConfig, BertModel, BertTokenizerFast  # noqa: PLC0415

    torch.manual_seed(0)
    words = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    config = BertConfig(vocab_size=len(words), num_attention_heads=12, **SHAPES[shape])
    BertModel(config).to(getattr(torch, dtype)).save_pretrained(folder)
    parts = ("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_N", "models.Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_N"):
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')


def make_texts(count: int) -> list[str]:
    """Texts of 1 to 248 words, half of them below 30."""
    rng = random.Random(count)
    lengths = [min(248, int(rng.lognormvariate(3.4, 0.9)) + 1) for _ in range(count)]
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(n)) for n in lengths]


def encoder_of(engine: str, folder: str, dtype: str) -> Callable[[list[str]], list[list[float]]]:
    """What turns texts into vectors."""
    if engine == "radixlm":
        import radixlm  # noqa: PLC0415

        served = radixlm.Engine(model_path=folder, log_level="error", dtype=dtype)
        return lambda texts: [one["embedding"] for one in served.encode(texts)]
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": dtype})
    return lambda texts: model.encode(texts, show_progress_bar=False).tolist()


def work(engine: str, folder: str, dtype: str, counts: list[int], repeats: int) -> None:
    """Print the seconds of every count, and the first vectors, as a line of JSON."""
    encode = encoder_of(engine, folder, dtype)
    encode(make_texts(4))
    found: dict[int, dict[str, Any]] = {}
    for count in counts:
        texts, seconds = make_texts(count), list[float]()
        encode(texts)  # first calls of a size find cold caches and slow clocks
        while len(seconds) < repeats or sum(seconds) < LEAST_S:
            began_s = time.perf_counter()
            vectors = encode(texts)
            seconds.append(time.perf_counter() - began_s)
        found[count] = {"seconds": statistics.median(seconds), "vectors": vectors[:32]}
    print(json.dumps(found), flush=True)


def apart(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest 1 - cosine of vectors of unit length."""
    pairs = zip(ours, theirs, strict=True)
    return max(1 - sum(x * y for x, y in zip(a, b, strict=True)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--shape", default="minilm", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--counts", default="1,32,256")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--model", help="a folder that an earlier run has made with this option")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    if args.worker:
        work(args.worker, args.model, args.dtype, counts, args.repeats)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.model or temporary)
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            make_model(folder, args.shape, args.dtype)
        found = {}
        for engine, python in ("radixlm", sys.executable), ("peer", args.peer_python):
            command = [python, *sys.argv, "--model", str(folder), "--worker", engine]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[engine] = json.loads(done.stdout.splitlines()[-1])
    for count in counts:
        ours, theirs = (found[engine][str(count)] for engine in ("radixlm", "peer"))
        words = sum(len(text.split()) + 2 for text in make_texts(count))
        rates = " ".join(
            f"{name} {count / one['seconds']:.1f} texts/s {words / one['seconds']:.0f} tokens/s"
            for name, one in (("radixlm", ours), ("sentence-transformers", theirs))
        )
        ratio, far = theirs["seconds"] / ours["seconds"], apart(ours["vectors"], theirs["vectors"])
        print(f"{args.shape} {args.dtype} {count:3}: {rates} ratio {ratio:.2f} apart {far:.1e}")


if __name__ == "__main__":
    main()
