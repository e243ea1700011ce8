import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from burnish.models.packing import PrefixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9)


def tree_of(sequences):
    lengths = [len(sequence) for sequence in sequences]
    return PrefixTree.of(np.concatenate(sequences).astype(np.int64), lengths), lengths


@given(SEQUENCES)
def test_a_row_for_every_distinct_prefix(sequences):
    tree, lengths = tree_of(sequences)
    prefixes = [tuple(s[: n + 1]) for s in sequences for n in range(len(s))]
    total = len(prefixes)
    if len(tree.computed) == total:  # not worthwhile
        assert (total - len(set(prefixes))) * 8 < total
        assert tree.own == tuple(lengths)
        assert (tree.rows == np.arange(total)).all()
        return
    assert len(tree.computed) == len(set(prefixes))
    assert (np.diff(tree.computed) > 0).all()
    for token, row in enumerate(tree.rows):
        assert prefixes[tree.computed[row]] == prefixes[token]
    whole = {tuple(sequence) for sequence in sequences}
    inner = {p[:n] for p in whole for n in range(1, len(p))}
    leaves = [tuple(s) for s, own in zip(sequences, tree.own, strict=True) if own]
    assert sorted(leaves) == sorted(whole - inner)
    ends = np.cumsum(lengths)
    last = [np.arange(end - own, end) for end, own in zip(ends, tree.own, strict=True)]
    assert np.concatenate(last).tolist() == tree.computed.tolist()


def test_samples_of_a_prompt_share_it():
    tree, _ = tree_of([[5, 6, 7, 1], [5, 6, 7, 2, 3], [9, 6], [5, 6, 7, 1]])
    assert len(tree.computed) == 4 + 2 + 2
    assert tree.own == (0, 5, 2, 1)


def test_a_common_first_token_is_not_worth_it():
    tree, _ = tree_of([[0, *range(n, n + 30)] for n in (100, 200, 300)])
    assert len(tree.computed) == 93
