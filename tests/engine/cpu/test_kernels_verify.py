"""Verification, node by node, against a walk by hand."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.verification import verify_tree_greedy_cpu

UNTOUCHED = -9


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First children and next siblings of a tree given by each node's parent (the root's is -1)."""
    families = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    sibling = {elder: younger for family in families for elder, younger in pairwise(family)}
    return [family[0] if family else -1 for family in families], [sibling.get(node, -1) for node in range(len(parents))]


def tensors(parents: list[list[int]], tokens: list[list[int]], depth: int) -> dict[str, torch.Tensor]:
    """The arguments but for what the target takes."""
    bs, nodes = len(parents), len(parents[0])
    first, sibling = zip(*map(links, parents), strict=True)
    return {
        "predicts": torch.full((bs * nodes,), UNTOUCHED, dtype=torch.int32),
        "accept_index": torch.full((bs, depth), -1, dtype=torch.int32),
        "accept_token_num": torch.full((bs,), UNTOUCHED, dtype=torch.int32),
        "candidates": torch.tensor(tokens),
        "retrive_index": torch.arange(bs * nodes).view(bs, nodes),
        "retrive_next_token": torch.tensor(first),
        "retrive_next_sibling": torch.tensor(sibling),
    }


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    bs, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    some_tokens = st.lists(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes), min_size=bs, max_size=bs)
    return {
        "parents": [[-1, *(draw(st.integers(0, i - 1)) for i in range(1, nodes))] for _ in range(bs)],
        "tokens": draw(some_tokens),
        "wanted": draw(some_tokens),
        "depth": draw(st.integers(1, nodes)),
    }


@pytest.mark.slow
@given(trees())
@settings(deadline=None, max_examples=200)
def test_it_is_a_walk_by_hand(tree: dict[str, Any]) -> None:
    arguments = tensors(tree["parents"], tree["tokens"], tree["depth"])
    verify_tree_greedy_cpu(**arguments, target_predict=torch.tensor(tree["wanted"]))
    predicts = [UNTOUCHED] * arguments["predicts"].numel()
    for i, (parents, tokens, wanted) in enumerate(zip(tree["parents"], tree["tokens"], tree["wanted"], strict=True)):
        path = [0]
        while len(path) < tree["depth"]:
            fits = [k for k, parent in enumerate(parents) if parent == path[-1] and tokens[k] == wanted[path[-1]]]
            if not fits:
                break
            path.append(fits[0])
        for node in path:
            predicts[i * len(parents) + node] = wanted[node]
        accepted = [i * len(parents) + node for node in path]
        assert arguments["accept_index"][i].tolist() == accepted + [-1] * (tree["depth"] - len(path))
        assert arguments["accept_token_num"][i] == len(path) - 1
    assert arguments["predicts"].tolist() == predicts
