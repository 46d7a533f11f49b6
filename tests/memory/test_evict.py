"""The eviction queue against sorting all candidates at every pop."""

from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.memory.prefix.evict import EvictionQueue, lfu, lru, slru
from radixlm.memory.prefix.node import Node

MOVES = st.lists(st.tuples(st.sampled_from(["push", "use", "drop", "pop"]), st.integers(0, 19)))


def make_nodes(num_nodes):
    return [Node(None, b"", b"", b"", serial) for serial in range(num_nodes)]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(MOVES, st.sampled_from([lru, lfu, slru]))
def test_pops_in_the_order_of_a_full_sort(moves, rank):
    queue, nodes, members = EvictionQueue(rank), make_nodes(20), set()
    for time, (move, index) in enumerate(moves, 1):
        node = nodes[index]
        if move == "push":
            queue.push(node)
            members.add(node)
        elif move == "use":
            node.last_access = time
            node.num_hits += index % 2
        elif move == "drop":
            queue.discard(node)
            members.discard(node)
        else:
            popped = queue.pop()
            assert (popped is None) == (not members)
            if popped is not None:
                assert popped in members and rank(popped) == min(map(rank, members))
                members.remove(popped)


def test_dropped_candidates_do_not_pile_up():
    queue, nodes = EvictionQueue(lru), make_nodes(1000)
    for node in nodes:
        queue.push(node)
        queue.discard(node)
    assert len(queue._heap) + len(queue._run) <= 65 and queue.pop() is None


def test_ranks_of_hot_prefixes_do_not_overflow():
    cold, hot = make_nodes(2)
    cold.last_access, hot.num_hits = 2**47, 2**40
    assert lfu(cold) < lfu(hot)
    assert slru(cold) < slru(hot)
