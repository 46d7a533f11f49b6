"""``python -m radixlm``."""

import sys

from radixlm.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
