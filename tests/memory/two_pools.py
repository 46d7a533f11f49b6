"""The two page allocators of a model with window layers, as the scheduler uses them."""

import numpy as np

from radixlm.memory.pages import NULL_PAGE
from radixlm.memory.prefix.window import WindowTable


class TwoPools:
    """Pages are allocated from both pools or from none."""

    def __init__(self, full, window, window_tokens):
        self.full = full
        self.window = window
        self.table = WindowTable(window_tokens, full.page_size)

    def alloc(self, num_pages):
        """`num_pages` of each group (full, window), or None without an allocation."""
        if num_pages > self.window.num_free:
            return None
        full = self.full.alloc(num_pages)
        return None if full is None else (full, self.window.alloc(num_pages))

    def free(self, full_pages, window_pages):
        """Free a request's own pages; null entries of `window_pages` are skipped."""
        window = np.asarray(window_pages, np.int32)
        self.full.free(full_pages)
        self.window.free(window[window != NULL_PAGE])

    def free_dead(self, row, num_computed, start_page=0):
        """Free pages outside the window of a running request and null them in `row`."""
        self.window.free(self.table.take_dead(row, num_computed, start_page))
