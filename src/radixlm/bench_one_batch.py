"""``python -m radixlm.bench_one_batch``: SGLang's name for `radixlm bench one-batch`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "one-batch", *sys.argv[1:]]))
