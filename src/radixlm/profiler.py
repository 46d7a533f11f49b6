"""``python -m radixlm.profiler``: SGLang's name for `radixlm profile`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
