"""Which bucket a batch size belongs to, and which arm it gets."""

from hypothesis import given
from hypothesis import strategies as st

from tests.strategy.kit import DEEP, SHALLOW, TREE
from tlt_server.strategy.arms import ArmTable, Bucket, Buckets

ARMS = st.sampled_from([SHALLOW, DEEP, TREE, None])


@given(st.lists(ARMS, min_size=1, max_size=8), st.data())
def test_a_batch_belongs_to_the_bucket_that_spans_it(arms: list[object], data: st.DataObject) -> None:
    more = data.draw(st.sets(st.integers(2, 255), min_size=len(arms) - 1, max_size=len(arms) - 1))
    buckets = Buckets([Bucket(first, (SHALLOW,)) for first in (1, *sorted(more))], largest=256)
    table = ArmTable(buckets.firsts, tuple(arms))  # type: ignore[arg-type]
    spans = [range(first, buckets.lasts[i] + 1) for i, first in enumerate(buckets.firsts)]
    assert [batch for span in spans for batch in span] == list(range(1, 257))
    for i, span in enumerate(spans):
        for batch in span:
            assert buckets.index(batch) == i
            assert table.arm(batch) == arms[i]
    assert table.arm(1000) == arms[-1]
