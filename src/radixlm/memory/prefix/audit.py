"""Does the tree agree with itself and with those who hold locks? Violations give both numbers."""

from collections import Counter
from collections.abc import Iterable

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle, Lock
from radixlm.memory.prefix.node import PAGE_ID_BYTES, TOKEN_BYTES, Node, join
from radixlm.memory.prefix.tree import Tree
from radixlm.memory.prefix.window import WindowGroup


def audit_shape(tree: Tree) -> list[str]:
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


def audit_locks(
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


def locked_pages(handle: Handle | None) -> PageIds:
    """Pages from the start to ``handle``; none if it is dead."""
    if not isinstance(handle, Node) or not handle.is_alive:
        return join(())
    return join(node.pages for node in handle.path())


def locked_window_pages(
    window: WindowGroup | None, handle: Handle | None, is_window_locked: bool
) -> PageIds:
    """Window pages that a lock on ``handle`` keeps."""
    if window is None or not is_window_locked:
        return join(())
    if not isinstance(handle, Node) or not handle.is_alive:
        return join(())
    rows = [node.window_pages for node in window.tail(handle)]
    return join(row for row in rows if row is not None)
