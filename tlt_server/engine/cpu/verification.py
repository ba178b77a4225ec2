"""Verification: walk the draft tree along what the target says, and say one token more.

Shapes: bs requests, `nodes` tree nodes each (node 0 is the root, the last committed token), at most `depth` nodes on a
path, the root counted. The links are tree.py's.
"""

from itertools import chain

import torch


def _walk(
    first_child: list[int], next_sibling: list[int], depth: int, tokens: list[int], wanted: list[int]
) -> list[int]:
    """Down a request's tree from the root, to the child that has the wanted token, until none has it or `depth` nodes.
    first_child, next_sibling: of each node, -1 for none. wanted: after each node."""
    path = [0]
    while len(path) < depth:
        child = first_child[path[-1]]
        while child != -1 and tokens[child] != wanted[path[-1]]:
            child = next_sibling[child]
        if child == -1:
            break
        path.append(child)
    return path


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the longest path whose every token is what the target takes at its parent (SpecInfer, arXiv 2305.09781).

    Reads `candidates`, the nodes' tokens, the links, and `target_predict`, the target's token after each node: all
    [bs, nodes] int64. Writes
        predicts          [bs * nodes] int32: at each accepted node, the token after it; the rest is left as it is
        accept_index      [bs, depth] int32: the accepted nodes, root first, by `retrive_index`; then -1
        accept_token_num  [bs] int32: accepted drafts, that is, neither the root nor the bonus token
    """
    depth = accept_index.shape[1]
    trees = zip(
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        [depth] * len(candidates),
        candidates.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    paths = [_walk(*tree) for tree in trees]
    reached = [[index[node] for node in path] for path, index in zip(paths, retrive_index.tolist(), strict=True)]
    emitted = [[said[node] for node in path] for path, said in zip(paths, target_predict.tolist(), strict=True)]
    predicts[list(chain(*reached))] = torch.tensor(list(chain(*emitted)), dtype=predicts.dtype, device=predicts.device)
    accept_index.copy_(torch.tensor([nodes + [-1] * (depth - len(nodes)) for nodes in reached]))
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in paths]))
