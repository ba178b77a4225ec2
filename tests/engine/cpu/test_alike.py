"""Passes that round alike: against plain ones, and bit for bit among themselves."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.alike import KEYS, ROWS, attend_alike, product
from tlt_server.engine.cpu.attention import Layout, attend, lay_out
from tlt_server.engine.cpu.install import create_attention_backend
from tlt_server.errors import UnsupportedError

HEADS, KV_HEADS, DIM, POOL = 4, 2, 64, 600


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3 * ROWS), st.integers(0, 40), st.sampled_from([(256, 768), (64, 295)]))
def test_a_row_of_a_product_is_the_same_among_any(rows: int, first: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(rows)
    left, weight = torch.randn(100, shape[0], generator=generator), torch.randn(*reversed(shape), generator=generator)
    whole = product(left, weight.T)
    torch.testing.assert_close(whole, left @ weight.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(product(left[first : first + rows], weight.T), whole[first : first + rows])


def test_of_no_rows_too() -> None:
    assert product(torch.ones(0, 3), torch.ones(3, 5)).shape == (0, 5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([0, 1, 5, KEYS - 1, KEYS, 130]), min_size=1, max_size=3), st.integers(0, 2**31))
def test_a_node_attends_as_plain_decoding_would(prefixes: list[int], seed: int) -> None:
    """Of trees of 5 nodes, whose prefixes are padded to the longest, each node and a pass of that node's path alone."""
    generator = torch.Generator().manual_seed(seed)
    bs, nodes = len(prefixes), 5
    rows = (torch.randperm(POOL - 1, generator=generator)[: bs * (max(prefixes) + nodes)] + 1).view(bs, -1).int()
    keys, values = torch.randn(2, POOL, KV_HEADS, DIM, generator=generator)
    query = torch.randn(bs, nodes, HEADS, DIM, generator=generator)
    parents = [-1, 0, 0, 1, 2]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    layout = lay_out(rows, torch.tensor(prefixes), ancestors.expand(bs, -1, -1))
    attended = attend_alike(query, keys, values, layout, DIM**-0.5)
    torch.testing.assert_close(attended, attend(query, keys, values, layout, DIM**-0.5), atol=2e-5, rtol=1e-4)
    for request, prefix in enumerate(prefixes):
        for node in range(nodes):
            path = prefix + ancestors[node].nonzero()[:, 0]
            slots = torch.cat([rows[request, :prefix], rows[request, path]])[None].long()
            alone = Layout(slots, torch.ones(1, 1, 1, slots.shape[1], dtype=torch.bool))
            one = attend_alike(query[request, node][None, None], keys, values, alone, DIM**-0.5)
            assert torch.equal(one[0, 0], attended[request, node])


def test_sliding_windows_are_refused() -> None:
    runner = SimpleNamespace(server_args=SimpleNamespace(enable_deterministic_inference=True), sliding_window_size=4096)
    with pytest.raises(UnsupportedError, match="--enable-deterministic-inference: on a CPU not with sliding windows"):
        create_attention_backend(runner)


@pytest.mark.slow
def test_the_mode_replaces_torchs_products() -> None:
    """In a process of its own: it cannot be left."""
    code = """
import torch
from torch.nn.functional import linear
from tlt_server.engine.cpu import alike
x, w, b = torch.randn(9, 256), torch.randn(512, 256), torch.randn(512)
before = linear(x, w, b)
alike.enable_batch_invariant_mode()
alike.enable_batch_invariant_mode()
assert alike.is_batch_invariant_mode_enabled()
assert torch.allclose(linear(x, w, b), before, atol=1e-4)
assert torch.equal(linear(x[:1], w, b), linear(x, w, b)[:1])
assert torch.equal(x[3:4] @ w.T, (x @ w.T)[3:4])
assert torch.allclose(torch.addmm(b, x, w.T, beta=0.5, alpha=2), 0.5 * b + 2 * (x @ w.T))
norm = alike.rms_norm_batch_invariant(x, torch.full((256,), 2.0), 1e-5)
assert torch.allclose(norm, 2 * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
