"""What the drafter missed: which of it is kept, and where the pass that catches up reads and writes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.decode.missed import FULL, LEAST_WINDOW, MEMORY, MOST_READ, WINDOW, Missed, ragged, window_of

SLOTS, LONGEST = 6, 400


@given(st.integers(1, 10_000), st.integers(1, 1 << 20))
def test_the_ring_takes_no_more_memory_than_it_may(rows: int, state_bytes: int) -> None:
    window = window_of(rows, state_bytes)
    assert 1 <= window <= WINDOW
    assert window == 1 or window * rows * state_bytes <= MEMORY


def test_a_server_of_256_requests_of_7b_keeps_them_all() -> None:
    assert window_of(256 + 17, 3584 * 2) == WINDOW


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6))
def test_the_last_tokens_of_each_sequence(each: list[tuple[int, int]]) -> None:
    counts = [count for count, _ in each]
    ends = [count + before for count, before in each]
    rows, positions = ragged(torch.tensor(ends), torch.tensor(counts), sum(counts))
    expected = [
        (row, p) for row, (end, count) in enumerate(zip(ends, counts, strict=True)) for p in range(end - count, end)
    ]
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == expected


def a_ring() -> tuple[Missed, Any]:
    """Over slots whose tokens lie in the pool at a place that says whose and which they are."""
    made: Any = object.__new__(Missed)
    made.window = 8
    made._states = torch.zeros(SLOTS, made.window, 1)
    made._tokens = torch.zeros(SLOTS, made.window, dtype=torch.int64)
    places = torch.arange(SLOTS)[:, None] * LONGEST + torch.arange(LONGEST)
    made._worker = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=places))
    return made, places


def a_batch(reqs: list[Any]) -> Any:
    lens = torch.tensor([req.length for req in reqs])
    slots = torch.tensor([req.slot for req in reqs])
    return SimpleNamespace(
        reqs=reqs, req_pool_indices=slots, seq_lens=lens, seq_lens_cpu=lens, orig_seq_lens=lens, device="cpu"
    )


@given(st.data())
def test_what_is_read_again_is_what_was_missed_last(data: st.DataObject) -> None:
    """Requests come, decode plainly by turns, and some join late; each position's state and token are its own."""
    ring, _ = a_ring()
    slots = data.draw(st.permutations(range(SLOTS)))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=SLOTS))
    reqs = [SimpleNamespace(slot=slot, length=length) for slot, length in zip(slots, lengths, strict=False)]
    starts = [req.length for req in reqs]
    for some in data.draw(st.lists(st.sets(st.sampled_from(range(len(reqs))), min_size=1), max_size=20)):
        batch = a_batch([reqs[i] for i in sorted(some)])
        ids = batch.req_pool_indices * LONGEST + batch.seq_lens
        ring.keep(batch, batch.seq_lens, ids[:, None].float(), -ids)
        for req in batch.reqs:
            req.length += 1
    missed = [min(req.length - start, ring.window) for req, start in zip(reqs, starts, strict=True)]
    assert ring.counts(reqs) == missed
    behind = [i for i, count in enumerate(missed) if count]
    if not behind:
        return
    extend = ring._extend(a_batch(reqs), behind, torch.tensor(behind), [missed[i] for i in behind])
    expected = [reqs[i].slot * LONGEST + p for i in behind for p in range(reqs[i].length - missed[i], reqs[i].length)]
    assert extend.out_cache_loc.tolist() == expected
    assert extend.spec_info.hidden_states[:, 0].tolist() == expected
    assert extend.input_ids.tolist() == [-each for each in expected]
    assert extend.prefix_lens == [reqs[i].length - missed[i] for i in behind]
    assert extend.seq_lens.tolist() == [reqs[i].length for i in behind]
    assert [req.slot for req in extend.reqs] == extend.req_pool_indices.tolist()
    rows = max(missed) + data.draw(st.integers(0, 3))
    counts, past = torch.tensor(missed), a_batch(reqs)
    past.seq_lens = past.seq_lens - counts
    tokens, states, places = (each.unflatten(0, (-1, rows)) for each in ring._rows(past, counts, rows))
    inside = torch.arange(rows) < counts[:, None]
    assert places[inside].tolist() == states[inside][:, 0].tolist() == (-tokens[inside]).tolist() == expected
    assert not places[~inside].any()
    ring.forget(reqs)
    assert not any(ring.counts(reqs))


@pytest.mark.slow
@given(st.integers(LEAST_WINDOW, WINDOW), st.integers(1, 512), st.integers(0, 10))
def test_no_ring_overflows_while_all_requests_decode_plainly(window: int, requests: int, late: int) -> None:
    """All fill theirs at once, but for some that came later; no reading takes more than its tokens, none is short."""
    ring, counts, read = a_ring()[0], [0] * requests, []
    ring.window = window
    counts[: late * requests // 10] = [-7] * (late * requests // 10)
    for _ in range(4 * window):
        if due := ring.due([min(max(count, 0), window) for count in counts]):
            assert 0 < sum(due) <= MOST_READ
            assert all(each in {0, count} for each, count in zip(due, counts, strict=True))
            counts = [0 if each else count for each, count in zip(due, counts, strict=True)]
            read += [each for each in due if each]
        counts = [count + 1 for count in counts]
        assert max(counts) <= window
    assert all(each >= FULL * window for each in read)


def test_a_ring_that_is_too_small_is_not_read_in_between() -> None:
    ring, _ = a_ring()
    assert ring.due([ring.window, 0]) == []


class Drafter:
    """Notes what draft-extend reads: of each request the places; proposes what says which token it read last."""

    def __init__(self, rows: int, requests: int) -> None:
        self.rows, self.passes = rows, 0
        self.places: list[list[int]] = [[] for _ in range(requests)]

    def read(self, past: Any, result: Any) -> None:
        self.passes += 1
        tokens, places = (each.unflatten(0, (-1, self.rows)) for each in (result.next_token_ids, past.out_cache_loc))
        assert past.seq_lens.tolist() == past.seq_lens_cpu.tolist()
        last = tokens.gather(1, result.accept_lens[:, None].long() - 1)
        for read, row, req, length in zip(self.places, places.tolist(), past.reqs, past.seq_lens.tolist(), strict=True):
            written = [place for place in row if place]
            assert written == [req.slot * LONGEST + length + k for k in range(len(written))]
            read.extend(written)
        for name in ("topk_p", "topk_index", "hidden_states"):
            setattr(result.next_draft_input, name, last)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=SLOTS), st.integers(1, 5))
def test_several_draft_extends_read_what_one_cannot(missed: list[int], rows: int) -> None:
    ring, _ = a_ring()
    reqs = [SimpleNamespace(slot=slot, length=20) for slot in range(len(missed))]
    for step in range(max(missed)):
        batch = a_batch([req for req, count in zip(reqs, missed, strict=True) if step < count])
        ids = batch.req_pool_indices * LONGEST + batch.seq_lens
        ring.keep(batch, batch.seq_lens, ids[:, None].float(), -ids)
        for req in batch.reqs:
            req.length += 1
    ring._worker.draft_worker = drafter = Drafter(rows, len(reqs))
    batch, before = a_batch(reqs), torch.arange(len(reqs))[:, None]
    batch.spec_info = SimpleNamespace(topk_p=before, topk_index=before, hidden_states=before)
    ring.read_in_step(batch, ring.counts(reqs))
    assert drafter.passes == -(-max(missed) // rows)
    for place, (req, count) in enumerate(zip(reqs, missed, strict=True)):
        ends = req.slot * LONGEST + req.length
        assert drafter.places[place] == list(range(ends - count, ends))
        assert batch.spec_info.topk_index[place].item() == (1 - ends if count else place)
    assert not any(ring.counts(reqs))
