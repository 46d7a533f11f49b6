"""``radixlm lora inspect PATH``: what an adapter changes, and whether a model can serve it."""

from radixlm.base.lazy import load
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.model_info import find_model
from radixlm.hub.locate import Wanted, locate_model


def main(argv: list[str]) -> int:
    """CheckpointError, with the reason, for an adapter that would be refused."""
    parser = VerbParser("radixlm lora", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="inspect")
    inspect = verbs.add_parser("inspect", help="show rank, size and modules of an adapter")
    inspect.add_argument("path", metavar="PATH", help="folder or hub name of a PEFT adapter")
    inspect.add_argument(
        "--model-path", "--model", help="check that every tensor has a place in this model"
    )
    args = parser.parse_args(argv)
    model = None
    if args.model_path:
        model = find_model(args.model_path)
    folder = locate_model(args.path, Wanted("adapter", "PATH"))
    print(load("radixlm.lora.inspect:inspect")(folder, model))
    return 0
