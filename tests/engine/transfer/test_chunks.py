"""What a trainer sends in chunks is what comes out of them."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.messages import Receive
from tlt_server.engine.transfer.chunks import Described, chunked, described, receive, unpacked
from tlt_server.errors import UpdateRefused

DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.int64)
tensors = st.lists(
    st.builds(
        Described, st.text(max_size=3), st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3).map(tuple)
    ),
    max_size=12,
)


def filled(wanted: Sequence[Described], seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(-100, 100, each.shape, generator=draw).to(each.dtype) for each in wanted]


def as_bytes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten().view(torch.uint8) for part in parts] or [torch.empty(0, dtype=torch.uint8)])


class Sender:
    """A group whose rank 0 has these tensors, and cuts them by a rule of its own: a running sum."""

    def __init__(self, parts: Sequence[torch.Tensor], limit: int | None) -> None:
        self._sent: list[torch.Tensor] = []
        waiting: list[torch.Tensor] = []
        for part in parts:
            waiting.append(part)
            if limit is None or sum(each.nbytes for each in waiting) > limit:
                self._sent.append(as_bytes(waiting) if limit is not None else part)
                waiting = []
        self._sent += [as_bytes(waiting)] if waiting else []

    def receive(self, buffer: torch.Tensor) -> None:
        sent = self._sent.pop(0)
        assert (sent.dtype, sent.shape) == (buffer.dtype, buffer.shape)
        buffer.copy_(sent)

    def close(self) -> None: ...

    @property
    def is_empty(self) -> bool:
        return not self._sent


@given(tensors, st.none() | st.integers(1, 200), st.integers(0, 9))
def test_what_is_sent_comes_out(wanted: list[Described], limit: int | None, seed: int) -> None:
    parts = filled(wanted, seed)
    sender, found = Sender(parts, limit), []
    receive(sender, wanted, limit, torch.device("cpu"), found.extend)
    assert sender.is_empty
    assert [name for name, _ in found] == [each.name for each in wanted]
    for (_, tensor), part in zip(found, parts, strict=True):
        assert torch.equal(tensor, part)
        assert tensor.dtype == part.dtype


@given(tensors, st.integers(1, 200))
def test_a_chunk_ends_once_it_is_too_large(wanted: list[Described], limit: int) -> None:
    chunks = list(chunked(wanted, limit))
    assert [each for chunk in chunks for each in chunk] == wanted
    for chunk in chunks[:-1]:
        assert sum(each.nbytes for each in chunk) > limit >= sum(each.nbytes for each in chunk[:-1])


def test_bytes_that_lie_askew_are_copied() -> None:
    wanted = [Described("a", torch.bfloat16, (3,)), Described("b", torch.float32, (2,))]
    parts = filled(wanted)
    assert torch.equal(unpacked(as_bytes(parts), wanted)[1][1], parts[1])


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "said"),
    [
        (["a"], [], [[1]], "1 names, 0 dtype_names, 1 shapes"),
        (["a"], ["bfloat17"], [[1]], "a: 'bfloat17' is no dtype"),
        (["a"], ["nn"], [[1]], "a: 'nn' is no dtype"),
        (["a"], ["float32"], [[-1]], "is no shape"),
        (["a"], ["float32"], [[2**40, 2**40]], "is no shape"),
    ],
)
def test_what_does_not_describe_tensors(
    names: list[str], dtypes: list[str], shapes: list[list[int]], said: str
) -> None:
    with pytest.raises(UpdateRefused, match=said):
        described(Receive(names, dtypes, shapes))
