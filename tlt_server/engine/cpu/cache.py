"""Cache bookkeeping: which slot of the KV cache holds which token.

`req_to_token[r, t]` is the slot that holds token t of the request in row r. Before a speculative step every request
owns more slots than it has committed tokens; drafting and verification write into these, and what was accepted stays.

Shapes: bs requests; `req_to_token` is [rows, pool_len] int32, slot lists are int64, `req_pool_indices` is [bs] and it,
starts and ends may be int32 or int64. `pool_len` repeats `req_to_token.shape[1]`: compiled kernels index raw memory.
"""

import torch

from tlt_server.errors import UnsupportedError


def _segments(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every place of the segments [starts[i], ends[i]), in order: (i of each place, the place), both [total] int64."""
    lengths = (ends - starts).long()
    owner = torch.repeat_interleave(lengths)
    first_of_owner = lengths.cumsum(0) - lengths
    return owner, torch.arange(owner.numel(), device=owner.device) + (starts - first_of_owner)[owner]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Give request i the next end[i] - start[i] slots of `out_cache_loc`, as its tokens [start[i], end[i]). Writes
    `req_to_token`. `out_cache_loc`: [sum of lengths] int64."""
    owner, place = _segments(start_offset, end_offset)
    req_to_token[req_pool_indices[owner], place] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """List the slots of tokens [start[i], end[i]) of each request, one request after the other. Writes the first (sum
    of lengths) places of `out_cache_loc` and leaves the rest, sized by the caller for the most."""
    owner, place = _segments(start_offset, end_offset)
    out_cache_loc[: owner.numel()] = req_to_token[req_pool_indices[owner], place].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """List the topk * num_steps slots that follow each request's committed tokens: where the drafter writes.
    `seq_lens`: [bs]. Writes `out_cache_loc`: [bs * topk * num_steps], read by upstream as [bs, topk, num_steps]."""
    place = seq_lens.long()[:, None] + torch.arange(topk * num_steps, device=seq_lens.device)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], place].view(-1))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """List the slots of the accepted nodes, without gaps.

    `accept_index`: [bs, depth] int32, indices into the batch's nodes, -1 where nothing was accepted. `out_cache_loc`:
    [bs * num_draft_tokens], a slot per node. Writes the first (number accepted) places of `accept_out_cache_loc`.
    """
    accepted = accept_index[accept_index >= 0]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Pick each request's last emitted token, which roots its next tree. `accept_tokens`: [bs, accept_stride] int32;
    `accept_lens`: [bs], at least 1, the bonus token counted. Writes `bonus_tokens`: [bs] int32."""
    last = accept_lens.long()[:, None] - 1
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last)[:, 0])


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens one place to the left and put its new token at the end, or at `select_index`.

    An EAGLE drafter reads the hidden state of token t beside token t + 1 (arXiv 2401.15077). Writes `input_ids`:
    [total] int64, request i in [start[i], start[i] + len[i]). `topk_index`: [bs] or [bs, 1], the new tokens;
    `select_index`: [bs], places in `input_ids`. A request of length 0 is left alone, its `select_index` unread.
    """
    ends = extend_start_loc + extend_seq_lens
    _, place = _segments(extend_start_loc, torch.maximum(ends - 1, extend_start_loc))
    input_ids[place] = input_ids[place + 1]
    nonempty = extend_seq_lens > 0
    last = ends - 1 if select_index is None else select_index
    input_ids[last[nonempty].long()] = topk_index.view(-1)[nonempty].to(input_ids.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots onto themselves, which is nothing; refuse any other copy.

    The arguments are bare addresses (`data_ptrs`: [buffers] uint64) and row sizes, with no length to check a slot
    against, so that one wrong slot would write over the process. Upstream can move rows of its own tensors instead,
    and then calls this once, to warm up, with slot 0 as source and target.

    Raises UnsupportedError: a real copy was asked for.
    """
    if not torch.equal(tgt_loc, src_loc):
        raise UnsupportedError(
            f"cannot move {tgt_loc.numel()} KV slots by address on a CPU: set SGLANG_NATIVE_MOVE_KV_CACHE=1 before "
            "SGLang is imported, and it moves rows of its own tensors"
        )
