"""Tree building: the drafter's beams, and the nodes picked from them, become a tree that one target pass verifies.

EAGLE-2 (arXiv 2406.16858): the drafter expands its topk best beams `depth` times, and of all the tokens that it scored
on the way the `num_draft_tokens` - 1 best are kept. A token is known by its place in the list of scores: the first topk
places are the root's children, and each beam that is expanded adds topk places. So place s was proposed by beam
s // topk, beam 0 being the root, and `parent_list` holds the place of each beam's own token.
"""

import torch
from torch.nn.functional import pad

from tlt_server.errors import UnsupportedError

FULL_MASK, QLEN_ONLY = 0, 1
"""Upstream's `TreeMaskMode`: a mask over the committed tokens and the tree, or over the tree alone."""


def _is_parent(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """[bs, nodes, nodes] bool: entry (i, j) says that node j is the parent of node i. The root is node 0.

    A node whose parent was not selected has none: a draft probability that rounds to 1.0 ties a child with its parent,
    and the selection may then keep the child alone.
    """
    beam = selected_index // topk
    place_of_beam = pad(parent_list, (0, 1)).gather(1, beam)  # padded: with one step there is no beam but the root
    parent_place = pad(place_of_beam.masked_fill(beam == 0, -1), (1, 0), value=-2)
    own_place = pad(selected_index, (1, 0), value=-1)
    return parent_place[:, :, None] == own_place[:, None, :]


def _first(choices: torch.Tensor) -> torch.Tensor:
    """The first True of the last dimension, as an index; -1 where there is none."""
    present, index = choices.byte().max(-1)
    return index.masked_fill(present == 0, -1)


def _write_mask(visible: torch.Tensor, seq_lens: torch.Tensor, tree_mask: torch.Tensor, mode: int) -> None:
    """Put `visible`, [bs, nodes, nodes], where `tree_mask`, flat, has the tree's cells, in upstream's layout `mode`."""
    bs, nodes, _ = visible.shape
    if mode == QLEN_ONLY:
        tree_mask.view(-1)[: bs * nodes * nodes] = visible.view(-1)
    elif mode == FULL_MASK:
        row_width = (seq_lens + nodes)[:, None, None]
        before_request = (nodes * row_width).cumsum(0) - nodes * row_width
        node = torch.arange(nodes, device=visible.device)
        tree_mask.view(-1)[before_request + node[:, None] * row_width + seq_lens[:, None, None] + node] = visible
    else:
        raise UnsupportedError(f"tree mask mode {mode} (bit-packed) needs a GPU: use --attention-backend torch_native")


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Lay out each request's tree of `draft_token_num` nodes, the last committed token being its root.

    parent_list: [bs, 1 + topk * (depth - 1)] int64, [bs, 0] at depth 1: the place of each beam's token.
    selected_index: [bs, nodes - 1] int64, ascending: the places that were kept, hence parents before children.
    verified_seq_len: [bs] int64: tokens in the KV cache, the root not among them.

    Written: tree_mask, flat bool: a node sees itself, its ancestors and the root; QLEN_ONLY: [bs * nodes * nodes];
    FULL_MASK: each row after its request's committed tokens, which are left as they are. positions: [bs * nodes] int64,
    of each node in its sequence. retrive_index: [bs, nodes] int64, of each node in the batch. retrive_next_token,
    retrive_next_sibling: [bs, nodes] int64, a node's first child and next sibling in the request, -1 for none, in
    ascending order, so that the drafter's best comes first at depth 1. A node without parent is linked to nothing, so
    it is never accepted. UnsupportedError: a mask mode that has no CPU form.
    """
    is_parent = _is_parent(parent_list, selected_index, topk)
    bs, nodes, _ = is_parent.shape
    parents = is_parent.float()
    # A power of (self or parent) counts the paths of at most that many hops: every ancestor is reached in `depth`.
    visible = torch.linalg.matrix_power(parents + torch.eye(nodes, device=parents.device), depth) > 0
    visible[:, :, 0] = True
    _write_mask(visible, verified_seq_len, tree_mask, int(tree_mask_mode))
    positions.view(bs, nodes).copy_(visible.sum(-1) - 1 + verified_seq_len[:, None])
    share_a_parent = (parents @ parents.mT) > 0
    retrive_index.copy_(torch.arange(bs * nodes, device=parents.device).view(bs, nodes))
    retrive_next_token.copy_(_first(is_parent.mT))
    retrive_next_sibling.copy_(_first(share_a_parent.triu(1)))
