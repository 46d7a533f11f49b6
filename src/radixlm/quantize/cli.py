"""``radixlm quantize MODEL -o FOLDER``: write a checkpoint in fewer bits, in the format of
compressed-tensors, which vLLM, SGLang and transformers read too."""

from __future__ import annotations

import shutil
from pathlib import Path

from radixlm.base.errors import ConfigError, reason
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.model_info import find_model
from radixlm.quantize.calibration import calibrate
from radixlm.quantize.methods import METHODS
from radixlm.quantize.run import Quantizer


def build_parser() -> VerbParser:
    """The options of the verb."""
    parser = VerbParser("radixlm quantize", __doc__)
    parser.add_argument("model", metavar="MODEL", help="folder or name of a checkpoint of floats")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--method",
        default="int4wo-128",
        choices=list(METHODS),
        help="how weights are stored",
    )
    group = parser.add_argument_group("calibration")
    group.add_argument("--calibration", metavar="FILE", help="a text; awq-like needs one")
    group.add_argument(
        "--calibration-tokens",
        type=int,
        default=16_384,
        metavar="N",
        help="tokens of the text that are read",
    )
    group.add_argument(
        "--calibration-length",
        type=int,
        default=1024,
        metavar="N",
        help="tokens that are read together",
    )
    parser.add_argument(
        "--max-shard-size-mb", type=int, default=4096, metavar="MB", help="largest file of weights"
    )
    return parser


def main(argv: list[str]) -> int:
    """0 once the checkpoint is whole; nothing is left of one that is not."""
    args = build_parser().parse_args(argv)
    method, target = METHODS[args.method], Path(args.output).expanduser()
    if method.name == "awq-like" and not args.calibration:
        raise ConfigError("--method awq-like: give --calibration FILE, or use --method int4wo-128")
    for flag in ("calibration_tokens", "calibration_length", "max_shard_size_mb"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: use 1 or more")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"-o {target}: is there already; name a new folder")
    source, scales = find_model(args.model), None
    if args.calibration:
        try:
            text = Path(args.calibration).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibration {args.calibration}: {reason(error)}") from error
        size = (args.calibration_tokens, args.calibration_length)
        scales = calibrate(source, text, method, *size)
    quantizer = Quantizer(source, method, scales)
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        report = quantizer.write(target, args.max_shard_size_mb << 20)
    except BaseException as error:
        for path in target.iterdir() if target.is_dir() else ():
            path.unlink()
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"-o {target}: {reason(error)}") from error
        raise
    print("\n".join(report.lines()))
    print(f"written to {target}; the error of each weight is in quantize_report.json")
    print(f"serve it with: radixlm serve --model-path {target}")
    return 0
