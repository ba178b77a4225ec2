"""What the seams of verification compute, on stand-ins for upstream's objects that hold just what is read."""

from types import SimpleNamespace

import pytest
import torch

from tlt_server.engine.decode.verify import forbid_early_stop, settle_greed

VOCAB = 12


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


@pytest.mark.parametrize(("temperatures", "greedy"), [([1, 1], True), ([1, 1.3], False), ([], True)])
def test_greedy_requests_keep_their_temperatures(temperatures: list[float], greedy: bool) -> None:
    """An idle batch has none."""
    info = SimpleNamespace(is_all_greedy=True)
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(temperature=each)) for each in temperatures]
    settle_greed(SimpleNamespace(reqs=reqs, sampling_info=info))
    assert info.is_all_greedy == greedy
