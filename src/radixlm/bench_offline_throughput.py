"""``python -m radixlm.bench_offline_throughput``: SGLang's name for `radixlm bench offline`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "offline", *sys.argv[1:]]))
