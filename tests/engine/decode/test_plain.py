"""What a plain step of a speculative server does beside the pass, and that nothing in it waits for a GPU."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tlt_server.engine.decode.plain import leave_out

SLOTS, HEADS, WIDTH = 12, 2, 3


class FromPython(TorchDispatchMode):
    """Tensors that are made of what Python holds: on a GPU each is a copy that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def a_pool(start_layer: int, layers: int) -> Any:
    buffers = {
        layer: (torch.ones(SLOTS, HEADS, WIDTH), torch.ones(SLOTS, HEADS, WIDTH))
        for layer in range(start_layer, start_layer + layers)
    }
    return SimpleNamespace(
        start_layer=start_layer,
        layer_num=layers,
        get_key_buffer=lambda layer: buffers[layer][0],
        get_value_buffer=lambda layer: buffers[layer][1],
        buffers=buffers,
    )


@given(st.sets(st.integers(0, SLOTS - 1)), st.integers(0, 2), st.integers(1, 3))
def test_what_is_left_out_is_zero_and_nothing_else_is(places: set[int], start_layer: int, layers: int) -> None:
    pool = a_pool(start_layer, layers)
    index = torch.tensor(sorted(places), dtype=torch.int64)
    with FromPython() as counted:
        leave_out(pool, index)
    assert counted.made == 0
    kept = [slot for slot in range(SLOTS) if slot not in places]
    for buffer in (each for pair in pool.buffers.values() for each in pair):
        assert not buffer[index].any()
        assert bool((buffer[kept] == 1).all())


def test_assigning_a_number_is_seen() -> None:
    """What `leave_out` must not do, and did."""
    buffer = torch.ones(SLOTS, HEADS)
    with FromPython() as counted:
        buffer[torch.tensor([1, 2])] = 0
    assert counted.made > 0
