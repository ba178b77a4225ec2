"""Verification: walk the draft tree along what the target would have said, and say one token more.

Both functions emit exactly what plain decoding emits, whatever was proposed: the same tokens when greedy, the same
distribution when sampling. A drafter only decides how many tokens one pass of the target yields.

Shapes: bs requests, `nodes` tree nodes each (node 0 is the root, the last committed token), at most `depth` nodes on a
path, the root counted. The links are tree.py's. Both functions write

    predicts          [bs * nodes] int32: at each accepted node, the token emitted after it; the rest is left as it is
    accept_index      [bs, depth] int32: the accepted nodes, root first, by `retrive_index`; then -1
    accept_token_num  [bs] int32: accepted drafts, that is, neither the root nor the bonus token
"""

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch


def _walk(
    first_child: list[int], next_sibling: list[int], depth: int, choose: Callable[[int, list[int]], int | None]
) -> tuple[list[int], list[int]]:
    """Down a request's tree from the root, to the child that `choose(node, children)` names, until it names none or
    `depth` nodes. Gives the path, and the children that were refused at its end, in the order in which they are tried.
    first_child, next_sibling: of each node, -1 for none."""
    path = [0]
    while len(path) < depth:
        children, child = [], first_child[path[-1]]
        while child != -1:
            children.append(child)
            child = next_sibling[child]
        if (chosen := choose(path[-1], children)) is None:
            return path, children
        path.append(chosen)
    return path, []


def _write(
    paths: list[list[int]],
    bonus: list[int],
    tokens: list[list[int]],
    retrive_index: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """Write a walk's outputs: each node on a path emits the next node's token, the last one emits the bonus token."""
    reached = [[index[node] for node in path] for path, index in zip(paths, retrive_index.tolist(), strict=True)]
    emitted = [
        [token[node] for node in path[1:]] + [last] for path, token, last in zip(paths, tokens, bonus, strict=True)
    ]
    depth = accept_index.shape[1]
    predicts[list(chain(*reached))] = torch.tensor(list(chain(*emitted)), dtype=predicts.dtype, device=predicts.device)
    accept_index.copy_(torch.tensor([nodes + [-1] * (depth - len(nodes)) for nodes in reached]))
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in paths]))


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
    """Accept the longest path whose every token is the target's most probable one (SpecInfer, arXiv 2305.09781).

    Reads `candidates`, the nodes' tokens, the links, and `target_predict`, the target's choice after each node: all
    [bs, nodes] int64. Writes as the module says.
    """
    tokens, wanted = candidates.tolist(), target_predict.tolist()

    def next_node(i: int, node: int, children: list[int]) -> int | None:
        return next((child for child in children if tokens[i][child] == wanted[i][node]), None)

    trees = zip(retrive_next_token.tolist(), retrive_next_sibling.tolist(), strict=True)
    paths = [_walk(*tree, accept_index.shape[1], partial(next_node, i))[0] for i, tree in enumerate(trees)]
    bonus = [wanted[i][path[-1]] for i, path in enumerate(paths)]
    _write(paths, bonus, tokens, retrive_index, predicts, accept_index, accept_token_num)


def _child_drawn(
    tokens: list[int],
    masses: list[list[float]],
    coins: list[float],
    threshold_single: float,
    threshold_acc: float,
    node: int,
    children: list[int],
) -> int | None:
    """The child on which the coin of `node` falls, the children's masses being laid end to end from 0.

    A token that is proposed twice has its mass once. A token without mass has no width: upstream's `coin <= mass` would
    take it on a coin of exactly 0, though the filters removed it.
    """
    reached, tried = 0.0, set()
    for child in children:
        mass = masses[node][child]
        if tokens[child] in tried:
            continue
        tried.add(tokens[child])
        reached += mass
        if coins[node] * threshold_acc < reached or mass >= threshold_single:
            return child
    return None


def _draw(rows: torch.Tensor, refused: list[list[int]], coins: torch.Tensor) -> list[int]:
    """One token from each row of masses, [bs, vocab], without its refused tokens: the rest's cdf, inverted at the coin.

    In float64, where coin * total < total for every float32 coin below 1, so that no coin falls past the last token
    that has mass; a token without mass has no width. The rest may be empty: the children have all the mass, yet it sums
    to less than one by rounding and the coin fell into the gap. Then any of them will do.
    """
    rest = rows.double()
    pairs = [(i, token) for i, tokens in enumerate(refused) for token in tokens]
    if pairs:
        rest[tuple(zip(*pairs, strict=True))] = 0.0
    cdf = rest.cumsum(-1)
    empty = cdf[:, -1] == 0
    if empty.any():
        cdf[empty] = rows[empty].double().cumsum(-1)
    drawn: list[int] = torch.searchsorted(cdf, coins.double()[:, None] * cdf[:, -1:], right=True)[:, 0].tolist()
    for i, token in enumerate(drawn):
        if token == rows.shape[1]:
            raise ValueError(
                f"request {i} of the batch has nothing to sample from: its probabilities sum to {float(cdf[i, -1])}, "
                f"its coin is {float(coins[i])}; look for logits that are not finite, or a mask that forbids all tokens"
            )
    return drawn


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Sample from the target, staying in the tree for as long as the draws do.

    Speculative sampling (arXiv 2211.17192, 2302.01318) over the children of a node (SpecInfer, arXiv 2305.09781), with
    draft probability 1: a child of target probability p is accepted with probability p, the next one with its share of
    what remains, which one coin against the accumulated mass decides. If all are refused, the token is drawn from the
    target without them.

    Reads
        candidates, retrive_*   [bs, nodes] int64: the nodes' tokens, and the links
        uniform_samples         [bs, nodes] float32 in [0, 1): each node's coin, which picks among its children
        uniform_samples_for_final_sampling
                                [bs] float32 in [0, 1): the coin of the last token
        target_probs            [bs, nodes, vocab] float32: the target after each node, filtered; a row sums to one but
                                for rounding
        threshold_single, threshold_acc
                                below 1 it is no longer lossless: a child with a mass of at least threshold_single is
                                accepted, and masses count 1 / threshold_acc times
    Leaves alone draft_probs, upstream's scratch space, and deterministic, which this always is.
    Writes as the module says. Raises ValueError: a row has no mass, or is not finite.
    """
    tokens, coins = candidates.tolist(), uniform_samples.tolist()
    bs, nodes = candidates.shape
    trees = zip(retrive_next_token.tolist(), retrive_next_sibling.tolist(), strict=True)
    masses = target_probs.gather(2, candidates[:, None, :].expand(bs, nodes, nodes)).tolist()
    thresholds = threshold_single, max(threshold_acc, 1e-9)
    walks = [
        _walk(*tree, accept_index.shape[1], partial(_child_drawn, tokens[i], masses[i], coins[i], *thresholds))
        for i, tree in enumerate(trees)
    ]
    paths = [path for path, _ in walks]
    refused = [[tokens[i][child] for child in children] for i, (_, children) in enumerate(walks)]
    rows = target_probs[list(range(bs)), [path[-1] for path in paths]]
    bonus = _draw(rows, refused, uniform_samples_for_final_sampling)
    _write(paths, bonus, tokens, retrive_index, predicts, accept_index, accept_token_num)
