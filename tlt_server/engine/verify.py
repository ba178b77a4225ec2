"""What the fork changes in verification, so that speculation samples exactly what plain decoding samples.

Upstream's verify step (`eagle_sample`) departs from plain decoding in three ways, each mended by one function here:
it ignores min_p and applies top-k and top-p one after the other (plain decoding applies them jointly), and it judges
min_new_tokens once for the whole tree by the length at its root.
"""

from typing import Any

import torch

from tlt_server.engine.sampling import filter_probs


def filter_target_probs(probs: torch.Tensor, sampling_info: Any, verify_input: Any) -> torch.Tensor:
    """The target's filtered distribution at every node of every request's tree.

    Args:
        probs: [bs * num_draft_tokens, vocab] float32, after temperature.
        sampling_info: upstream's `SamplingBatchInfo` of the batch.

    Returns:
        The same shape, filtered by each request's top_k, top_p and min_p, renormalised.
    """
    info = sampling_info
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return probs
    filters = (info.top_ks, info.top_ps, info.min_ps)
    return filter_probs(probs, *(each.repeat_interleave(verify_input.draft_token_num) for each in filters))


def sample_filtered(probs: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """Plain decoding's draw under filters, by the same law as verification: [bs] int32 token ids.

    Upstream's flashinfer sampler filters jointly, except in a batch where any request asks for min_p: there it filters
    one after the other, so that what a request samples depends on its neighbours.
    """
    info = sampling_info
    kept = filter_probs(probs, info.top_ks, info.top_ps, info.min_ps)
    return torch.multinomial(kept, num_samples=1).view(-1).to(torch.int32)


def forbid_early_stop(logits: torch.Tensor, positions: torch.Tensor, reqs: list[Any]) -> None:
    """Sets the logits of stop tokens to -inf, in place, at nodes that lie before a request's min_new_tokens.

    Args:
        logits: [bs * num_draft_tokens, vocab], the target's at every node.
        positions: [bs * num_draft_tokens] int, each node's position in its sequence; the token sampled after a node
            at position p is output number p + 1 - prompt length, counted from zero.
        reqs: the batch's requests, in order.
    """
    if not any(req.sampling_params.min_new_tokens for req in reqs):
        return
    nodes = positions.view(len(reqs), -1)
    first_free = [len(req.origin_input_ids) - 1 + req.sampling_params.min_new_tokens for req in reqs]
    early = nodes < torch.tensor(first_free).to(nodes.device, non_blocking=True)[:, None]
    stops = torch.zeros(len(reqs), logits.shape[-1], dtype=torch.bool)
    for row, req in zip(stops, reqs, strict=True):
        row[sorted(stop_tokens(req))] = True
    forbidden = early[:, :, None] & stops.to(logits.device, non_blocking=True)[:, None, :]
    logits.masked_fill_(forbidden.view_as(logits), float("-inf"))


def stop_tokens(req: Any) -> set[int]:
    """The tokens that min_new_tokens holds back: exactly those that upstream's plain decoding does."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
    return stops if req.tokenizer.eos_token_id is None else stops | {req.tokenizer.eos_token_id}
