"""The command ``radixlm`` and ``python -m radixlm``: Ctrl-C is quiet while they import, too."""

import sys
from importlib import import_module


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the command line names; the exit status. ``argv``: instead of sys.argv."""
    try:
        return int(import_module("radixlm.entrypoints.cli").main(argv))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
