"""A token's experts lie where its keys and values do, through any steps, with overlap and without."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.state_capturer.base import BaseTopkCapturer
from torch import Tensor

from tlt_server.engine.decode.routed import RoutedExperts

PLACES, LAYERS, EXPERTS, REQUESTS, NODES = 24, 2, 3, 2, 4


class Pool:
    """Keys and values that tell who wrote them: a row [layers, experts] of numbers never used before."""

    def __init__(self) -> None:
        self.rows = torch.zeros(PLACES, LAYERS, EXPERTS, dtype=torch.int32)

    def move_kv_cache(self, into: Tensor, out_of: Tensor) -> None:
        self.rows[into] = self.rows[out_of]


class Steps:
    """A server's passes: each writes rows at places, and moves some; results are settled later where steps overlap."""

    def __init__(self, *, overlap: bool) -> None:
        self._capturer: Any = BaseTopkCapturer(PLACES, REQUESTS, LAYERS, EXPERTS, "cpu", "routed_experts")
        self.pool, self.overlap, self._written = Pool(), overlap, 0
        self.routed = RoutedExperts(self._capturer, self.pool, REQUESTS * NODES)
        self._waiting: Any = None

    def verify(self, places: Tensor, moves: tuple[Tensor, Tensor] | None) -> None:
        rows = torch.arange(places.numel() * LAYERS * EXPERTS, dtype=torch.int32).view(-1, LAYERS, EXPERTS)
        rows, self._written = rows + self._written, self._written + rows.numel()
        for layer in range(LAYERS):
            self._capturer.capture(layer, rows[:, layer])
        self.pool.rows[places] = rows
        result = SimpleNamespace(
            routed_experts_output=self._capturer.on_forward_end(
                SimpleNamespace(out_cache_loc=places), False, None, no_copy_to_cpu=self.overlap
            )
        )
        if moves is not None:
            self.pool.move_kv_cache(*moves)
        self.routed.follow(result)
        self.settle()
        self._waiting = result.routed_experts_output
        if self._waiting is not None:
            self._waiting.map_device_tensors(torch.clone)

    def settle(self) -> None:
        if self._waiting is not None:
            self._waiting.finalize()
        self._waiting = None

    def told(self) -> Tensor:
        self.settle()
        found: Tensor = self._capturer.host_cache.buffer
        return found


@st.composite
def a_step(draw: st.DrawFn) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The places of nodes, and where those of accepted ones go: to the front, as upstream does, padded by place 0."""
    places = torch.tensor(draw(st.permutations(range(1, PLACES)))[: REQUESTS * NODES])
    if draw(st.booleans()):
        return places, None  # a chain
    into, out_of = [], []
    for nodes in places.view(REQUESTS, NODES).tolist():
        path = [0, *sorted(draw(st.sets(st.integers(1, NODES - 1))))]
        into += nodes[: len(path)]
        out_of += [nodes[node] for node in path]
    padding = [0] * (REQUESTS * NODES - len(into))
    return places, (torch.tensor(into + padding), torch.tensor(out_of + padding))


@given(st.lists(a_step(), min_size=1, max_size=6), st.booleans())
def test_rows_lie_where_keys_and_values_do(steps: list[Any], overlap: bool) -> None:
    server = Steps(overlap=overlap)
    for places, moves in steps:
        server.verify(places, moves)
    assert torch.equal(server.told()[1:], server.pool.rows[1:])  # place 0 is nobody's


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_pass_chose_outlives_the_next_pass(overlap: bool) -> None:
    server = Steps(overlap=overlap)
    server.verify(torch.arange(1, 9), None)
    server.verify(torch.arange(9, 17), None)
    assert torch.equal(server.told()[1:], server.pool.rows[1:])


def test_a_buffer_that_has_room_stays() -> None:
    capturer: Any = BaseTopkCapturer(PLACES, REQUESTS * NODES, LAYERS, EXPERTS, "cpu", "routed_experts")
    before = capturer.device_cache
    RoutedExperts(capturer, Pool(), REQUESTS * NODES)
    assert capturer.device_cache is before
