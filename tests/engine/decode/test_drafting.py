"""Which of the drafter's logits get the noise, and of which position."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tlt_server.engine.decode.drafting import Drafting
from tlt_server.engine.sampling.drafts import EVERY, SHARPNESS, DraftNoise
from tlt_server.engine.sampling.noise import gumbel

VOCAB, ROWS = 11, 8


def info(seeds: list[int], temperature: float = 1.0, greedy: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_seed=torch.tensor(seeds),
        temperatures=torch.full((len(seeds), 1), temperature),
        top_ks=torch.full((len(seeds),), 1 if greedy else 1 << 30),
    )


def drafting() -> Any:
    worker = Drafting.__new__(Drafting)
    worker.noise, worker.hot_token_id = DraftNoise(ROWS, "cpu"), None
    return worker


def noisy(logits: torch.Tensor, seed: int, position: int, sharpness: float = SHARPNESS[2]) -> torch.Tensor:
    return logits + gumbel(torch.tensor([seed]), torch.tensor([position]), VOCAB)[0] / sharpness


def in_force(noise: DraftNoise) -> int:
    """Which of SHARPNESS proposals have, for requests with the seeds from 1 to 4."""
    logits = noise.add(torch.zeros(4, VOCAB), torch.zeros(4, dtype=torch.int64), 1, None)
    full = gumbel(torch.arange(1, 5), torch.full((4,), 2), VOCAB)
    return next(i for i, beta in enumerate(SHARPNESS) if torch.allclose(logits, full / beta))


def test_of_a_draft_extend_in_a_padded_graph_the_rows_that_are_read() -> None:
    """Logits are of one row of each request, and of the padding; upstream selects them of all rows all the same, and
    leaves the counts of the padding among those of the batch."""
    worker, width = drafting(), 4
    worker.noise.follow(info([5, 6, 7]))
    before, accepted = torch.randn(4, VOCAB), [1, 4, 2]
    output = SimpleNamespace(next_token_logits=before.clone())
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        input_ids=torch.zeros(3 * width),
        positions=torch.arange(3 * width) + 20,
        batch_size=3,
        req_pool_indices=torch.tensor([1, 2, 3]),
        spec_info=SimpleNamespace(num_accept_tokens=torch.tensor([*accepted, width])),
    )
    worker.make_noisy(output, batch)
    read = [width * request + count - 1 for request, count in enumerate(accepted)]
    logits = output.next_token_logits[torch.tensor(read)]
    assert type(logits) is torch.Tensor
    assert logits.shape == (3, VOCAB)
    for place, (seed, row) in enumerate(zip((5, 6, 7), read, strict=True)):
        torch.testing.assert_close(logits[place], noisy(before[place], seed, 20 + row + 2))


def test_of_a_prefill_the_last_position_of_each_request() -> None:
    worker = drafting()
    worker.noise.follow(info([5, 6], temperature=0.5))
    before = torch.randn(2, VOCAB)
    output = SimpleNamespace(next_token_logits=before.clone())
    lengths = torch.tensor([9, 4])
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, positions=torch.arange(13), batch_size=2, seq_lens=lengths)
    worker.make_noisy(output, batch)
    for row, (seed, length) in enumerate(((5, 9), (6, 4))):
        torch.testing.assert_close(output.next_token_logits[row], noisy(2 * before[row], seed, length + 1))


@pytest.mark.parametrize("greedy", [False, True])
def test_of_a_step_of_a_tree_every_branch(greedy: bool) -> None:
    worker, branches = drafting(), 3
    worker.noise.follow(info([5, 6], greedy=greedy))
    before = torch.randn(2 * branches, VOCAB)
    output = SimpleNamespace(next_token_logits=before.clone())
    positions = torch.tensor([30] * branches + [40] * branches)
    worker.make_noisy(output, SimpleNamespace(forward_mode=ForwardMode.DECODE, positions=positions, batch_size=2))
    for row in range(2 * branches):
        expected = before[row] if greedy else noisy(before[row], 5 + row // branches, int(positions[row]) + 2)
        torch.testing.assert_close(output.next_token_logits[row], expected)


@pytest.mark.slow
@pytest.mark.parametrize("best", range(len(SHARPNESS)))
def test_the_sharpness_becomes_that_whose_proposals_the_target_takes(best: int) -> None:
    """The drafter's logits are of a law sharper or flatter than the target's, by as much."""
    noise, requests, generator = DraftNoise(ROWS, "cpu"), torch.arange(4), torch.Generator().manual_seed(1)
    noise.follow(info([1, 2, 3, 4]))
    sharpness = SHARPNESS[best]
    for step in range(60 * EVERY):
        positions = torch.full((4,), 10 + step)
        scores = torch.randn(4, VOCAB, generator=generator)
        noise.compare(scores, positions, requests, None)
        target = scores + gumbel(torch.arange(1, 5), positions + 2, VOCAB) / sharpness
        noise.tell(target.argmax(-1), positions + 1, requests)
    assert in_force(noise) == best


def test_another_drafter_begins_where_the_last_one_was_and_is_measured_anew() -> None:
    noise, requests, generator = DraftNoise(ROWS, "cpu"), torch.arange(4), torch.Generator().manual_seed(1)
    noise.follow(info([1, 2, 3, 4]))
    for step in range(90 * EVERY):
        sharpness = SHARPNESS[0] if step < 60 * EVERY else float("inf")
        if step == 60 * EVERY:
            noise.forget()
            assert in_force(noise) == 0
        positions = torch.full((4,), 10 + step)
        scores = torch.randn(4, VOCAB, generator=generator)
        noise.compare(scores, positions, requests, None)
        target = scores + gumbel(torch.arange(1, 5), positions + 2, VOCAB) / sharpness
        noise.tell(target.argmax(-1), positions + 1, requests)
    assert SHARPNESS[in_force(noise)] == float("inf")
