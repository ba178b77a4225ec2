"""What the seams of verification compute, on stand-ins for upstream's objects that hold just what is read."""

from types import SimpleNamespace

import pytest
import torch

from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.engine.decode.verify import filter_target_probs, forbid_early_stop, sample_filtered

VOCAB = 12


def info(*, top_k: bool = True, top_p: bool = True, min_p: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        top_ks=torch.tensor([3, 1 << 30, 1]),
        top_ps=torch.tensor([0.7, 0.9, 1.0]),
        min_ps=torch.tensor([0.1, 0.0, 0.0]),
        need_top_k_sampling=top_k,
        need_top_p_sampling=top_p,
        need_min_p_sampling=min_p,
    )


@pytest.fixture
def probs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, VOCAB, generator=generator).mul(2).softmax(-1)


def test_every_node_has_its_requests_filters(probs: torch.Tensor) -> None:
    nodes = probs.repeat_interleave(4, dim=0)
    filtered = filter_target_probs(nodes, info(), SimpleNamespace(draft_token_num=4))
    for request in range(3):
        alone = filter_probs(probs[[request]], *(f[[request]] for f in (info().top_ks, info().top_ps, info().min_ps)))
        torch.testing.assert_close(filtered[4 * request : 4 * request + 4], alone.expand(4, -1))


def test_no_filter_costs_nothing(probs: torch.Tensor) -> None:
    neutral = info(top_k=False, top_p=False, min_p=False)
    assert filter_target_probs(probs, neutral, SimpleNamespace(draft_token_num=1)) is probs


@pytest.mark.slow
def test_sample_filtered_draws_from_the_joint_law(probs: torch.Tensor) -> None:
    """20,000 draws; the largest of 36 shares strays by 0.02 with a probability below 1e-6 (Hoeffding, union bound)."""
    torch.manual_seed(1)
    law = filter_probs(probs, info().top_ks, info().top_ps, info().min_ps)
    draws = torch.stack([sample_filtered(probs, info()) for _ in range(20_000)])
    assert draws.dtype == torch.int32
    shares = torch.stack([torch.bincount(draws[:, row].long(), minlength=VOCAB) / len(draws) for row in range(3)])
    assert (shares - law).abs().max() < 0.02
    assert not shares[law == 0].any()


def request(prompt: int, least: int, stops: set[int] | None, eos: int | None = 1, outputs: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=[0] * prompt,
        output_ids=[0] * outputs,
        sampling_params=SimpleNamespace(min_new_tokens=least, stop_token_ids=stops),
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=eos),
    )


def test_stop_tokens_are_held_back_node_by_node() -> None:
    """A request of 10 prompt tokens whose root is its second output, at position 11, and needs 4."""
    requests = [request(10, 4, {7}), request(10, 0, {7})]
    positions = torch.tensor([[11, 12, 12, 13]] * 2).flatten()
    logits = torch.zeros(8, VOCAB)
    forbid_early_stop(logits, positions, requests)
    held = logits.view(2, 4, VOCAB) == float("-inf")
    # outputs so far at the nodes: 2, 3, 3, 4; the last may stop
    assert held[0, :, 7].tolist() == held[0, :, 1].tolist() == [True, True, True, False]
    assert held[0].sum() == 6
    assert not held[1].any()


def test_nothing_is_held_back_where_nobody_asks() -> None:
    logits = torch.zeros(4, VOCAB)
    forbid_early_stop(logits, torch.arange(4), [request(1, 0, {7}), request(1, 0, None, eos=None)])
    forbid_early_stop(logits, torch.arange(4), [request(1, 3, {7}, outputs=3), request(1, 0, None)])
    assert not logits.any()
