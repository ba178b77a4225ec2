"""The CPU engine's attention against a loop over requests, queries and keys, for every kind of pass."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.attention import attend, lay_out

HEADS, KV_HEADS, DIM, POOL = 4, 2, 8, 64


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [HEADS, DIM] over the keys and values it sees, [n, KV_HEADS, DIM]: softmax(q k / sqrt d) v."""
    group = HEADS // KV_HEADS
    heads = [(q[h] @ k[:, h // group].T / math.sqrt(DIM)).softmax(-1) @ v[:, h // group] for h in range(HEADS)]
    return torch.stack(heads)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_prefixes_and_new_tokens(prefixes: list[int], n_q: int, n_new: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bs, row = len(prefixes), max(prefixes) + n_new
    req_to_token = (torch.randperm(POOL - 1, generator=generator)[: bs * row] + 1).view(bs, row).int()
    keys, values = torch.randn(2, POOL, KV_HEADS, DIM, generator=generator)
    query = torch.randn(bs, n_q, HEADS, DIM, generator=generator)
    visible = torch.rand(bs, n_q, n_new, generator=generator) < 0.5
    visible[:, :, 0] = True
    layout = lay_out(req_to_token, torch.tensor(prefixes), visible)
    output = attend(query, keys, values, layout, DIM**-0.5)
    for b, prefix in enumerate(prefixes):
        for i in range(n_q):
            seen = [*req_to_token[b, :prefix].tolist()]
            seen += [int(req_to_token[b, prefix + j]) for j in range(n_new) if visible[b, i, j]]
            expected = by_hand(query[b, i], keys[seen], values[seen])
            torch.testing.assert_close(output[b, i], expected, atol=2e-5, rtol=1e-4)


def test_a_draft_branch_sees_its_own_tokens_only() -> None:
    """topk 2, 3 steps: at step 1 branch 1 sees places 3 and 4 of its slots, and nothing of branch 0's."""
    place, branch = torch.arange(6), torch.arange(2)
    visible = (place // 3 == branch[:, None]) & (place % 3 <= 1)
    layout = lay_out(torch.arange(1, 9)[None].int(), torch.tensor([2]), visible[None])
    assert layout.slots.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert layout.mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 0]]
