import numpy as np
import pytest

from tba.policy import blocks
from tba.policy.blocks import Group, plan_blocks


def _groups(seed=0, queries=12):
    """Prompts and rows of unequal length, packed one after the other: prompts, then rows."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 40, queries)
    starts = np.cumsum(prompts) - prompts
    at = int(prompts.sum())
    groups = []
    for start, length in zip(starts, prompts, strict=True):
        rows = np.sort(rng.integers(1, 300, rng.integers(0, 9)))[::-1].copy()
        begins = at + np.cumsum(rows) - rows
        groups.append(Group(int(start), int(length), begins, rows))
        at += int(rows.sum())
    return groups, at


@pytest.mark.parametrize("overhead", [0, 2**14, 2**40])
def test_every_token_of_a_row_attends_in_one_block_to_all_before_it_and_to_its_prompt(overhead):
    groups, tokens = _groups()
    seen = {}
    for block in plan_blocks(groups, overhead):
        hidden_own, hidden_prefix = block.hidden_own(None), block.hidden_prefix(None)
        for g, row, t in np.argwhere(block.real):
            own = block.own[g, row][~hidden_own[t]].tolist()
            if hidden_prefix is None:
                prefix = block.prefix[g].tolist()
            else:
                prefix = block.prefix[g][~hidden_prefix[g, min(t, hidden_prefix.shape[1] - 1)]]
            token = int(block.token[g, row, t])
            assert token not in seen
            seen[token] = (list(prefix), own)
    expected = {}
    for group in groups:
        prompt = list(range(group.prefix_start, group.prefix_start + group.prefix_length))
        for start, length in zip(group.row_start.tolist(), group.row_length.tolist(), strict=True):
            expected |= {
                start + at: (prompt, list(range(start, start + at + 1))) for at in range(length)
            }
    assert seen == expected
    assert len(seen) == tokens - sum(group.prefix_length for group in groups)


def test_a_window_hides_what_is_that_far_back_in_prompt_and_row():
    (block,) = plan_blocks([Group(0, 3, np.array([3]), np.array([4]))], 0)
    positions = np.arange(7)
    visible = (positions <= positions[3:, None]) & (positions[3:, None] - positions < 3)
    hidden = np.concatenate([block.hidden_prefix(3)[0], block.hidden_own(3)], axis=1)
    np.testing.assert_array_equal(~hidden, visible)


def test_a_block_of_several_rows_has_a_bounded_number_of_scores(monkeypatch):
    monkeypatch.setattr(blocks, "_MOST_SCORES", 50_000)
    groups, _ = _groups()
    planned = plan_blocks(groups, 2**40)
    for block in planned:
        scores = block.token.size * (block.own.shape[2] + block.prefix.shape[1])
        assert scores <= 50_000 or block.token.shape[:2] == (1, 1)
    real = [block.token[block.real] for block in planned]
    assert len(np.unique(np.concatenate(real))) == sum(group.row_length.sum() for group in groups)


def test_costly_blocks_are_few_and_cheap_ones_hold_little_padding():
    groups, _ = _groups()

    def scores(overhead):
        planned = plan_blocks(groups, overhead)
        padded = sum(b.token.size * (b.own.shape[2] + b.prefix.shape[1]) for b in planned)
        needed = sum(b.real.sum() * (b.own.shape[2] + b.prefix.shape[1]) for b in planned)
        return len(planned), padded / needed

    (many, little), (few, much) = scores(0), scores(2**40)
    assert many > 3 * few
    assert little < 1.1 < much
