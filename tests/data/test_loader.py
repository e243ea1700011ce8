import hashlib
import json
from copy import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.loader import Loader, MeasuredLoader, MixedLoader, order
from burnish.errors import IncompatibleError
from burnish.records.seeds import derive_seed


@given(st.integers(0, 2**64), st.integers(0, 100), st.integers(1, 200))
def test_an_epoch_is_a_permutation(seed, epoch, size):
    assert sorted(order(seed, epoch, size).tolist()) == list(range(size))


def test_the_order_is_pinned_so_that_old_runs_resume_alike():
    assert order(0, 0, 10).tolist() == [9, 2, 5, 1, 8, 3, 0, 7, 4, 6]
    digest = hashlib.sha256(order(1, 2, 1000).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "a060bf0020ff722d"


def test_every_position_gets_every_sample_about_equally_often():
    """Chi-squared over 6 x 6 cells; 25 degrees of freedom, 60 has probability 1e-4."""
    counts = np.zeros((6, 6))
    for seed in range(3000):
        counts[np.arange(6), order(seed, 0, 6)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 60


def test_seeds_and_epochs_differ():
    assert len({tuple(order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}) == 25


@given(st.integers(1, 20), st.lists(st.integers(0, 25), max_size=8), st.booleans())
def test_however_taken_the_samples_are_the_same(size, counts, shuffle):
    """Also across epochs, and with a loader made anew from the cursor before each take."""
    whole = Loader(size, 3, shuffle).take(sum(counts))
    cursor, parts = 0, []
    for count in counts:
        loader = Loader(size, 3, shuffle, cursor)
        parts += loader.take(count)
        cursor = loader.cursor
    assert parts == whole
    assert cursor == sum(counts)
    for start in range(0, len(whole) - size + 1, size):
        assert sorted(whole[start : start + size]) == list(range(size))


def test_the_cursor():
    loader = Loader(5, 0, shuffle=False)
    assert loader.take(7) == [0, 1, 2, 3, 4, 0, 1]
    assert loader.cursor == 7
    loader.cursor = 4
    assert loader.take(2) == [4, 0]


@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 4))
def test_by_epoch_each_sample_comes_once_in_an_epoch_wherever_it_is_taken_up(size, count, epochs):
    """The last part of each epoch is what is left of it, so further epochs change nothing of the first ones."""
    takes = Loader(size, 3, shuffle=True, by_epoch=True).takes(count, epochs)
    cursor, parts = 0, []
    for _ in range(takes):
        loader = Loader(size, 3, shuffle=True, cursor=cursor, by_epoch=True)
        parts.append(loader.take(count))
        cursor = loader.cursor
    assert cursor == size * epochs
    each = takes // epochs
    for epoch in range(epochs):
        mine = parts[epoch * each : (epoch + 1) * each]
        assert [index for part in mine for index in part] == order(3, epoch, size).tolist()
        assert [len(part) for part in mine[:-1]] == [count] * (each - 1)


@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 4))
def test_across_epochs_as_many_full_parts_as_reach_their_end(size, count, epochs):
    loader = Loader(size, 3, shuffle=True)
    takes = loader.takes(count, epochs)
    assert (takes - 1) * count < size * epochs <= takes * count
    assert loader.epoch_steps(count) * count == size


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(0, 25_000),
)
def test_a_mixture_is_a_function_of_the_cursor(parts, counts, first):
    """However it is taken, and wherever it is taken up; each data set's own samples come in its own order."""
    sizes, weights = zip(*parts, strict=True)

    def loader(cursor):
        mixed = MixedLoader([Loader(size, 3, shuffle=True) for size in sizes], weights)
        mixed.cursor = cursor
        return mixed

    whole, cursor, taken = loader(first).take(sum(counts)), first, []
    for count in counts:
        mixed = loader(cursor)
        taken += mixed.take(count)
        cursor = mixed.cursor
    assert taken == whole
    from_the_start = loader(0).take(200)
    starts = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        own = [
            i - starts[number] for i in from_the_start if starts[number] <= i < starts[number + 1]
        ]
        assert own == Loader(size, 3, shuffle=True).take(len(own))


def test_every_stretch_of_a_mixture_has_nearly_its_shares():
    mixed = MixedLoader([Loader(7, 0, shuffle=True), Loader(1000, 0, shuffle=True)], [3, 1])
    first = np.array(mixed.take(30_000)) < 7
    for length in (4, 100, 1000):
        shares = first[: 30_000 // length * length].reshape(-1, length).mean(axis=1)
        assert abs(shares - 0.75).max() <= 1 / length


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans())
def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch(difficulty, shuffle):
    hard = np.array(difficulty, dtype=np.float64)
    loader = Loader(len(hard), 1, shuffle, difficulty=hard)
    for _ in range(2):
        taken = loader.take(len(hard))
        assert sorted(taken) == list(range(len(hard)))
        assert (np.diff(hard[taken]) >= 0).all()


def test_equally_hard_samples_are_shuffled():
    loader = Loader(50, 1, shuffle=True, difficulty=np.zeros(50))
    assert loader.take(50) != loader.take(50)


def by_a_plain_list(size, shuffle, counts, alike):
    """What a measured curriculum takes, and which prompts it thinks are alike, by lists alone."""
    times, slot, visits, taken = [0] * size, 0, [0] * size, []
    for count in counts:
        part = []
        while len(part) < count:
            epoch, at = divmod(slot, size)
            index = order(5, epoch, size).tolist()[at] if shuffle else at
            key = derive_seed(5, "measured", epoch)
            draw = np.random.Philox(key=key).random_raw(size).tolist()[index] / 2**64
            slot += 1
            if draw < 0.5 ** times[index]:
                part.append(index)
        for index in part:
            times[index] = min(times[index] + 1, 3) if alike(index, visits[index]) else 0
            visits[index] += 1
        taken.append(part)
    return taken


@settings(deadline=None)
@given(st.integers(1, 12), st.booleans(), st.lists(st.integers(1, 6), max_size=12), st.integers())
def test_a_measured_curriculum_is_a_function_of_its_state(size, shuffle, counts, salt):
    """Each batch is drawn and heard of by another loader, from what a checkpoint holds."""

    def alike(index, visit):
        return derive_seed(salt, index, visit) % 3 > 0

    state, visits, taken = 0, [0] * size, []
    for count in counts:
        loader = MeasuredLoader(size, 5, shuffle)
        loader.state = state
        part = loader.take(count)
        said = []
        for index in part:
            said.append(alike(index, visits[index]))
            visits[index] += 1
        before, shared = loader.state, copy(loader)  # another thread's
        loader.update(part, said)
        assert shared.state == before
        cursor, text = json.loads(json.dumps(loader.state))
        state = (cursor, text)
        taken.append(part)
    assert taken == by_a_plain_list(size, shuffle, counts, alike)


def test_prompts_that_teach_nothing_are_asked_less_often():
    loader, asked = MeasuredLoader(400, 5, shuffle=True), np.zeros(400)
    while loader.cursor < 400 * 40:
        taken = loader.take(10)
        np.add.at(asked, taken, 1)
        loader.update(taken, [index < 200 for index in taken])
    assert abs(asked[200:] - 40).max() <= 1
    assert 40 / 8 < asked[:200].mean() < 40 / 8 + 4
    assert asked[:200].min() >= 1


@pytest.mark.parametrize("state", [3, (3,), (3, 4), (3, "x"), (3, ""), (3, "eJwDAAAAAAE=")])
def test_a_state_of_another_loader_is_refused(state):
    with pytest.raises(IncompatibleError):
        MeasuredLoader(4, 5, shuffle=True).state = state
