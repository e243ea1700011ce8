"""Which stages and which moments of a pipeline a plan may leave out."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.plan.pipelines import Pipelines, _flights

KINDS = st.integers(0, 2)


@given(st.data(), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(1, 12))
def test_what_is_left_out_is_never_the_fullest(data, ranks, virtual, microbatches):
    """Whatever layers of each kind keep, in two models that are cut alike."""
    virtual = virtual if ranks > 1 else 1
    least = ranks * virtual
    orders = data.draw(
        st.lists(st.lists(KINDS, min_size=least, max_size=20), min_size=1, max_size=2)
    )
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    models = [Pipelines(order) for order in orders]

    def kept(number, flights):
        """By the first model's micro-batches in flight, beside all layers of the second."""
        first, *others = (model.stages(ranks, virtual)[number] for model in models)
        of_chunks = [sum(sizes[kind] * n for kind, n in chunk.items()) for chunk in first.chunks]
        beside = sum(sizes[kind] * n for other in others for kind, n in other.counts.items())
        flown = flights(first, microbatches)
        return beside + max(sum(a * b for a, b in zip(of_chunks, f, strict=True)) for f in flown)

    found = [stage.number for stage in models[0].fullest(ranks, virtual, models[1:])]
    most = max(kept(number, _flights) for number in range(ranks))
    assert max(kept(number, models[0].flights) for number in found) == most
    assert (found[0], found[-1]) == (0, ranks - 1)


def test_a_pipeline_of_like_layers_is_as_full_as_its_ends():
    assert [stage.number for stage in Pipelines([0] * 61).fullest(16, 1, [])] == [0, 15]


def test_stages_with_other_layers_are_looked_at_too():
    """The second has most of the second kind."""
    stages = Pipelines([0, 0, 1, 1, 0, 1]).fullest(3, 1, [])
    assert [stage.number for stage in stages] == [0, 1, 2]
