"""Verification, node by node: greedy against a walk by hand, sampling at the edges of its coins."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.verification import tree_speculative_sampling_target_only, verify_tree_greedy_cpu

UNTOUCHED = -9


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First children and next siblings of a tree given by each node's parent (the root's is -1)."""
    families = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    sibling = {elder: younger for family in families for elder, younger in pairwise(family)}
    return [family[0] if family else -1 for family in families], [sibling.get(node, -1) for node in range(len(parents))]


def tensors(parents: list[list[int]], tokens: list[list[int]], depth: int) -> dict[str, torch.Tensor]:
    """The arguments that both kernels share."""
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


@given(trees())
@settings(deadline=None, max_examples=200)
def test_greedy_is_a_walk_by_hand(tree: dict[str, Any]) -> None:
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


def sample(
    row: list[float], children: list[int], coin: float, final_coin: float, **thresholds: float
) -> tuple[int, int]:
    """One node with `children` and the target's `row` after it: (accepted drafts, the token emitted first)."""
    nodes = len(children) + 1
    arguments = tensors([[-1] + [0] * len(children)], [[0, *children]], depth=2)
    tree_speculative_sampling_target_only(
        **arguments,
        uniform_samples=torch.full((1, nodes), coin),
        uniform_samples_for_final_sampling=torch.tensor([final_coin]),
        target_probs=torch.tensor(row).expand(1, nodes, -1).contiguous(),
        draft_probs=torch.zeros(1, nodes, len(row)),
        **thresholds,
    )
    return int(arguments["accept_token_num"]), int(arguments["predicts"][0])


LAST = 1 - 2**-24  # the greatest float32 below one, and the greatest coin
SHORT = [0.5, 0.5 - 2**-23, 0.0]  # sums to less than LAST


@pytest.mark.parametrize(
    ("row", "children", "coin", "final_coin", "expected"),
    [
        pytest.param([0.25, 0.75], [1], 0.75 - 2**-24, 0.0, (1, 1), id="the coin is below the child's mass"),
        pytest.param([0.25, 0.75], [1], 0.75, 0.0, (0, 0), id="the coin is the child's mass, no longer in it"),
        pytest.param([0.25, 0.25, 0.5], [1, 2], 0.25, 0.0, (1, 2), id="the second child's share follows the first's"),
        pytest.param([0.25, 0.25, 0.5], [2, 1], 0.75, LAST, (0, 0), id="both refused: only the third token is left"),
        pytest.param([0.5, 0.25, 0.25], [0, 0, 1], 0.75, 0.0, (0, 2), id="a token proposed twice has its mass once"),
        pytest.param([0.0, 1.0], [0], 0.0, 0.0, (0, 1), id="coin 0 does not take a child without mass"),
        pytest.param([0.0, 0.5, 0.5], [1], 0.5, 0.0, (0, 2), id="final coin 0 does not draw a token without mass"),
        pytest.param([0.5, 0.5, 0.0], [0], 0.5, LAST, (0, 1), id="the last final coin does not either"),
        pytest.param(SHORT, [0, 1], LAST, LAST, (0, 1), id="all mass refused in a rounding gap: a child after all"),
        pytest.param(SHORT, [0, 1], LAST, 0.0, (0, 0), id="any child"),
        pytest.param(
            [0.0, 1.0, 0.0], [0, 1, 2], LAST, LAST, (1, 1), id="a greedy row takes its token whatever the coin"
        ),
        pytest.param(
            [0.0, 1.0, 0.0], [0, 2], 0.0, LAST, (0, 1), id="a greedy row says its token if it is not proposed"
        ),
        pytest.param([0.75, 0.0, 0.25], [], 0.0, 0.75, (0, 2), id="a leaf draws from the whole row"),
    ],
)
def test_edges_of_the_coins(
    row: list[float], children: list[int], coin: float, final_coin: float, expected: Any
) -> None:
    assert sample(row, children, coin, final_coin) == expected


@pytest.mark.parametrize(
    ("thresholds", "coin", "accepted"),
    [
        ({}, 0.375, 0),
        ({"threshold_acc": 0.5}, 0.375, 1),
        ({"threshold_acc": 0.5}, 0.5, 0),
        ({"threshold_acc": 0.0}, 0.9, 1),
        ({"threshold_single": 0.25}, 0.9, 1),
        ({"threshold_single": 0.26}, 0.9, 0),
    ],
)
def test_thresholds_accept_more(thresholds: dict[str, float], coin: float, accepted: int) -> None:
    assert sample([0.25, 0.75], [0], coin, 0.0, **thresholds)[0] == accepted


@pytest.mark.parametrize("row", [[0.0, 0.0], [float("nan")] * 2])
def test_a_row_with_nothing_to_sample_is_an_error(row: list[float]) -> None:
    with pytest.raises(ValueError, match="request 0 of the batch has nothing to sample from"):
        sample(row, [0], 0.5, 0.5)
