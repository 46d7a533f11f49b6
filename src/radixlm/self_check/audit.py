"""Does the tree agree with itself and with those who hold locks? Violations give both numbers."""

from collections import Counter
from collections.abc import Iterable

from radixlm.base.record import Record
from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle, PrefixCache
from radixlm.memory.prefix.node import PAGE_ID_BYTES, TOKEN_BYTES, Node, join
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.tree import Tree
from radixlm.memory.prefix.window import WindowGroup

Lock = tuple[Handle | None, bool]
"""What a request has locked, if anything, and whether the window too (not after ``unlock_window``).
"""


class Audit(Record):
    """What a cache owns, found by walking it, and where its counters disagree.

    pages, window_pages: ids of all that it owns (twice if a bug put one twice).
    paths, window_paths: for each lock that was asked about, ids of the pages that it keeps.
    """

    violations: list[str]
    pages: PageIds
    window_pages: PageIds
    paths: list[PageIds]
    window_paths: list[PageIds]


def audit(cache: PrefixCache, locks: Iterable[Lock], is_repair: bool = False) -> Audit:
    """Compares a cache's counters with its nodes and with ``locks``, all that are held.

    With ``is_repair`` lock counts and sums are then set to what they should be.
    """
    locks = list(locks)
    if not isinstance(cache, RadixCache):
        none = [join(()) for _ in locks]
        return Audit([], join(()), join(()), none, none)
    violations = _audit_shape(cache.tree)
    violations += _audit_locks(cache.tree, cache.window, locks, is_repair)
    nodes = list(cache.tree.nodes())
    total = sum(node.num_pages for node in nodes)
    num_locked = sum(node.num_pages for node in nodes if node.num_locks)
    if (cache.total_pages, cache.num_locked) != (total, num_locked):
        violations.append(
            f"the tree counts {cache.total_pages} pages, {cache.num_locked} locked; "
            f"its nodes hold {total}, {num_locked} locked"
        )
    if cache.window is not None:
        violations += _audit_window(cache.window, nodes, is_repair)
    if is_repair:
        cache.total_pages, cache.num_locked = total, num_locked
        for node in nodes:
            if not node.num_locks and not node.children:
                cache.queue.push(node)
    return Audit(
        violations,
        join(node.pages for node in nodes),
        join(node.window_pages for node in nodes if node.window_pages is not None),
        [_locked_pages(handle) for handle, _ in locks],
        [_locked_window_pages(cache.window, *lock) for lock in locks],
    )


def _audit_shape(tree: Tree) -> list[str]:
    """Every node stands under the right edge and has as many pages as its tokens fill."""
    violations: list[str] = []
    for node in tree.nodes():
        parent = node.parent
        head = node.tokens[: tree.page_size * TOKEN_BYTES]
        stored = node.edge[1] if isinstance(node.edge, tuple) else node.edge
        if parent is None or parent.children.get(node.edge) is not node or stored != head:
            violations.append(f"node {node.serial} does not stand under its first page")
        num_tokens = len(node.tokens) // TOKEN_BYTES
        is_tail = tree.is_tail(node) and num_tokens and node.num_pages == 1 and not node.children
        if (num_tokens != node.num_pages * tree.page_size and not is_tail) or not node.num_pages:
            violations.append(
                f"node {node.serial} has {num_tokens} tokens in {node.num_pages} pages "
                f"of {tree.page_size}"
            )
        heads = [edge[1] if isinstance(edge, tuple) else edge for edge in node.children]
        if sorted(heads) != (node.heads or []):
            violations.append(f"node {node.serial} lists {node.heads}, its children are {heads}")
        for pages in (node.pages, node.window_pages):
            if pages is not None and len(pages) != node.num_pages * PAGE_ID_BYTES:
                violations.append(
                    f"node {node.serial} has {len(pages) // PAGE_ID_BYTES} page ids, "
                    f"counts {node.num_pages}"
                )
    return violations


def _audit_locks(
    tree: Tree, window: WindowGroup | None, locks: Iterable[Lock], is_repair: bool
) -> list[str]:
    """Lock counts of the nodes against the handles that are locked, as often as they are."""
    wanted: Counter[Node] = Counter()
    window_wanted: Counter[Node] = Counter()
    violations: list[str] = []
    for handle, is_window_locked in locks:
        if handle is None:
            continue
        if not isinstance(handle, Node) or not handle.is_alive:
            violations.append("a request has locked a prefix that is no longer cached")
            continue
        wanted.update(handle.path())
        if window is not None and is_window_locked:
            window_wanted.update(window.tail(handle))
    for node in tree.nodes():
        if node.num_locks != wanted[node]:
            violations.append(
                f"node {node.serial} has {node.num_locks} locks, requests hold {wanted[node]}"
            )
        if node.num_window_locks != window_wanted[node]:
            violations.append(
                f"node {node.serial} has {node.num_window_locks} window locks, "
                f"requests hold {window_wanted[node]}"
            )
        if is_repair:
            node.num_locks = wanted[node]
            node.num_window_locks = window_wanted[node]
    return violations


def _audit_window(window: WindowGroup, nodes: list[Node], is_repair: bool) -> list[str]:
    """Violations of the sums and of "locked means live"; sums are set right if asked."""
    live = [node for node in nodes if node.window_pages is not None]
    total = sum(node.num_pages for node in live)
    num_locked = sum(node.num_pages for node in live if node.num_window_locks)
    violations = [
        f"node {node.serial} is a tombstone with {node.num_window_locks} window locks"
        for node in nodes
        if node.window_pages is None and node.num_window_locks
    ]
    if (window.total_pages, window.num_locked) != (total, num_locked):
        violations.append(
            f"the window group counts {window.total_pages} pages, {window.num_locked} locked; "
            f"its nodes hold {total}, {num_locked} locked"
        )
    if is_repair:
        window.total_pages, window.num_locked = total, num_locked
        for node in live:
            if not node.num_window_locks:
                window.queue.push(node)
    return violations


def _locked_pages(handle: Handle | None) -> PageIds:
    """Pages from the start to ``handle``; none if it is dead."""
    if not isinstance(handle, Node) or not handle.is_alive:
        return join(())
    return join(node.pages for node in handle.path())


def _locked_window_pages(
    window: WindowGroup | None, handle: Handle | None, is_window_locked: bool
) -> PageIds:
    """Window pages that a lock on ``handle`` keeps."""
    if window is None or not is_window_locked:
        return join(())
    if not isinstance(handle, Node) or not handle.is_alive:
        return join(())
    rows = [node.window_pages for node in window.tail(handle)]
    return join(row for row in rows if row is not None)
