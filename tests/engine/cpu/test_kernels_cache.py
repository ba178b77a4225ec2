"""Cache bookkeeping against plain loops."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu import cache
from tlt_server.errors import UnsupportedError

POOL_LEN = 24
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


@st.composite
def segments(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(req_to_token, req_pool_indices, starts, ends) of 1 to 5 requests; empty segments among them."""
    rows = draw(st.permutations(range(6)))[: draw(st.integers(1, 5))]
    bounds = [sorted(draw(st.tuples(*[st.integers(0, POOL_LEN)] * 2))) for _ in rows]
    dtype, offsets_dtype = draw(INDEX_DTYPES), draw(INDEX_DTYPES)
    table = torch.randperm(6 * POOL_LEN, dtype=torch.int32).view(6, POOL_LEN)
    starts, ends = torch.tensor(bounds, dtype=offsets_dtype).T
    return table, torch.tensor(rows, dtype=dtype), starts, ends


@given(segments())
@settings(deadline=None)
def test_slots_go_to_the_segments_in_order(case: tuple[torch.Tensor, ...]) -> None:
    table, rows, starts, ends = case
    slots = torch.arange(1000, 1000 + int((ends - starts).sum()) + 3)
    expected, queue = table.clone(), iter(slots.tolist())
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for place in range(start, end):
            expected[row, place] = next(queue)
    cache.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, POOL_LEN)
    assert torch.equal(table, expected)


@given(segments())
@settings(deadline=None)
def test_the_segments_slots_are_listed_and_the_rest_left_alone(case: tuple[torch.Tensor, ...]) -> None:
    table, rows, starts, ends = case
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    expected = [int(slot) for row, start, end in bounds for slot in table[row, start:end]]
    out = torch.full((len(expected) + 3,), -7)
    cache.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, POOL_LEN)
    assert out.tolist() == [*expected, -7, -7, -7]


@given(segments(), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None)
def test_draft_slots_follow_the_committed_tokens(case: tuple[torch.Tensor, ...], topk: int, steps: int) -> None:
    table, rows, starts, _ = case
    starts = starts.clamp(max=POOL_LEN - topk * steps)
    out = torch.full((len(rows) * topk * steps,), -7)
    cache.assign_draft_cache_locs_contiguous_cpu(rows, table, starts, out, POOL_LEN, topk, steps)
    ranges = [
        table[row, start : start + topk * steps] for row, start in zip(rows.tolist(), starts.tolist(), strict=True)
    ]
    assert out.tolist() == torch.cat(ranges).tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None)
def test_accepted_slots_and_bonus_tokens(accept_lens: list[int]) -> None:
    depth, nodes = 4, 6
    paths = [sorted(random.Random(i).sample(range(nodes), length)) for i, length in enumerate(accept_lens)]
    accepted = [[i * nodes + node for node in path] for i, path in enumerate(paths)]
    accept_index = torch.tensor([path + [-1] * (depth - len(path)) for path in accepted], dtype=torch.int32)
    slots = torch.randperm(len(paths) * nodes) + 50
    out = torch.full((len(paths) * depth,), -7)
    cache.fill_accept_out_cache_loc_cpu(accept_index, slots, out)
    expected = [int(slots[node]) for path in accepted for node in path]
    assert out.tolist() == expected + [-7] * (out.numel() - len(expected))

    tokens = torch.randint(0, 99, (len(paths), depth), dtype=torch.int32)
    bonus = torch.empty(len(paths), dtype=torch.int32)
    cache.fill_bonus_tokens_cpu(tokens, torch.tensor(accept_lens, dtype=torch.int32), bonus, depth)
    assert bonus.tolist() == [int(row[length - 1]) for row, length in zip(tokens, accept_lens, strict=True)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=5), st.booleans(), INDEX_DTYPES)
@settings(deadline=None)
def test_rotation_shifts_each_request_and_appends(
    shape: list[tuple[int, int]], select: bool, dtype: torch.dtype
) -> None:
    """Each request has a length and a gap after it, which belongs to nobody."""
    ids = torch.randint(0, 99, (sum(map(sum, shape)) + 1,))
    expected, starts, chosen, place = ids.tolist(), [], [], 0
    for i, (length, gap) in enumerate(shape):
        starts.append(place)
        chosen.append(place + i % max(length, 1))
        if length:
            expected[place : place + length - 1] = expected[place + 1 : place + length]
            expected[chosen[i] if select else place + length - 1] = 100 + i
        place += length + gap
    lengths = torch.tensor([length for length, _ in shape])
    new = torch.arange(100, 100 + len(shape)).view(-1, 1)
    cache.rotate_input_ids_cpu(
        ids, torch.tensor(starts, dtype=dtype), lengths, new, torch.tensor(chosen) if select else None
    )
    assert ids.tolist() == expected


def test_slots_move_onto_themselves_only() -> None:
    buffer = torch.arange(8.0)
    address, stride = torch.tensor([buffer.data_ptr()], dtype=torch.uint64), torch.tensor([4])
    cache.copy_all_layer_kv_cache_cpu(address, stride, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(UnsupportedError, match="SGLANG_NATIVE_MOVE_KV_CACHE=1"):
        cache.copy_all_layer_kv_cache_cpu(address, stride, torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert buffer.tolist() == list(range(8))
