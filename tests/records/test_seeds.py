from hypothesis import given
from hypothesis import strategies as st

from burnish.records.seeds import derive_seed

PARTS = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


def test_the_value_is_pinned_so_that_old_runs_resume_alike():
    assert derive_seed(0, "shuffle", 0) == 4573817141999876003


@given(st.integers(0, 2**70), PARTS, PARTS)
def test_different_parts_give_different_seeds(seed, one, other):
    assert 0 <= derive_seed(seed, *one) < 2**64
    assert (derive_seed(seed, *one) == derive_seed(seed, *other)) == (one == other)


def test_types_and_boundaries_of_parts_count():
    seeds = {
        derive_seed(0, "1"),
        derive_seed(0, 1),
        derive_seed(0, "ab", "c"),
        derive_seed(0, "a", "bc"),
    }
    assert len(seeds) == 4
