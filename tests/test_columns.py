import numpy as np

from tba.columns import (
    Growing,
    last_of_each,
    occurrences,
    places_among,
    ranges,
    sequence_keys,
)


def keys(query_ids, sequences):
    offsets = np.cumsum([0, *map(len, sequences)])
    tokens = np.array([t for s in sequences for t in s], dtype=np.int32)
    return sequence_keys(np.array(query_ids), tokens, offsets)


def test_keys_tell_apart_queries_lengths_and_orders():
    sequences = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (1, 1)]
    ids = [q for q in range(50) for _ in sequences]
    found = keys(ids, sequences * 50)
    assert len(np.unique(found)) == 50 * len(sequences)


def test_a_key_does_not_depend_on_its_neighbours():
    together = keys([3, 4, 3], [(5, 6), (7,), (5, 6)])
    assert together[0] == together[2] == keys([3], [(5, 6)])[0]
    assert together[1] == keys([4], [(7,)])[0]


def test_the_last_of_each_key_is_found_in_order():
    assert last_of_each(np.array([5, 3, 5, 9, 3, 1], dtype=np.uint64)).tolist() == [2, 3, 4, 5]


def test_occurrences_count_each_rows_key_also_of_several_columns():
    assert occurrences(np.array([5, 3, 5, 9, 5])).tolist() == [3, 1, 3, 1, 3]
    assert occurrences(np.empty(0, np.uint64)).tolist() == []
    assert occurrences(np.array([1, 1, 1, 2]), np.array([2, 3, 2, 2])).tolist() == [2, 1, 2, 1]


def test_membership_and_ranges():
    assert places_among(np.array([4, 2]), np.array([1, 2, 3, 4, 5])).tolist() == [-1, 1, -1, 0, -1]
    assert ranges(np.array([7, 0, 3]), np.array([2, 0, 3])).tolist() == [7, 8, 3, 4, 5]
    assert ranges(np.empty(0, int), np.empty(0, int)).tolist() == []


def test_growing_keeps_what_was_written():
    growing = Growing(np.int32)
    for i in range(100):
        growing.extend(3)[:] = i
    assert growing.rows.tolist() == np.repeat(np.arange(100), 3).tolist()
    assert len(growing.data) < 2 * growing.size
