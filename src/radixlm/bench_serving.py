"""``python -m radixlm.bench_serving``: SGLang's name for `radixlm bench serve`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
