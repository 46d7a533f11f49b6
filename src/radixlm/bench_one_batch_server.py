"""``python -m radixlm.bench_one_batch_server``: `radixlm bench one-batch-server`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "one-batch-server", *sys.argv[1:]]))
