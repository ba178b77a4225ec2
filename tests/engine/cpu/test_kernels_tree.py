"""Tree building against trees of plain objects, drafted as EAGLE-2 drafts them."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import NamedTuple, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.tree import FULL_MASK, QLEN_ONLY, build_tree_kernel_efficient_cpu
from tlt_server.engine.sampling.penalties import paths_of
from tlt_server.errors import UnsupportedError


@dataclass(eq=False)
class Token:
    """A drafted token; `place` is its place in the list of scores, -1 for the root."""

    place: int = -1
    parent: Self | None = None
    score: float = 1.0

    def line(self) -> list["Token"]:
        """The token, its parent, and so on up to the root."""
        return [self, *(self.parent.line() if self.parent else [])]


@dataclass
class Draft:
    """What upstream's drafting hands over, and the tree that it stands for."""

    parent_list: list[int]
    selected: list[int]
    nodes: list[Token]


@st.composite
def drafts(draw: st.DrawFn, topk: int, depth: int, nodes: int) -> Draft:
    """Draft probabilities of 1 tie a child with its parent, so that a parent may go missing."""
    root = Token()
    beams, scored, parent_list = [root], [], [-1]
    for _ in range(depth):
        expanded = []
        for beam in beams:
            for _ in range(topk):
                probability = draw(st.sampled_from([1.0, 0.5, 0.25]))
                expanded.append(Token(len(scored) + len(expanded), beam, beam.score * probability))
        scored += expanded
        beams = sorted(expanded, key=lambda token: -token.score)[:topk]
        parent_list += [beam.place for beam in beams]
    order = draw(st.permutations(scored))
    kept = sorted(sorted(order, key=lambda token: -token.score)[: nodes - 1], key=lambda token: token.place)
    known = parent_list[:-topk] if depth > 1 else []
    return Draft(known, [token.place for token in kept], [root, *kept])


class Batch(NamedTuple):
    topk: int
    depth: int
    nodes: int
    drafts: list[Draft]
    seq_lens: list[int]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    topk, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    nodes = draw(st.integers(2, min(8, 1 + topk + (depth - 1) * topk * topk)))
    batch = draw(st.lists(drafts(topk, depth, nodes), min_size=1, max_size=3))
    return Batch(topk, depth, nodes, batch, [draw(st.integers(0, 5)) for _ in batch])


def build(batch: Batch, mode: int, mask: torch.Tensor) -> torch.Tensor:
    """Run the kernel: [4, bs, nodes], positions, own index, first child, next sibling. Writes `mask`."""
    parent_list = torch.tensor([draft.parent_list for draft in batch.drafts], dtype=torch.int64)
    selected = torch.tensor([draft.selected for draft in batch.drafts])
    out = torch.full((4, len(batch.drafts), batch.nodes), -1)
    outputs, sizes = (out[0].view(-1), *out[1:]), (batch.topk, batch.depth, batch.nodes)
    build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor(batch.seq_lens), mask, *outputs, *sizes, mode)
    return out


@pytest.mark.slow
@given(batches())
@settings(deadline=None, max_examples=150)
def test_links_and_positions(batch: Batch) -> None:
    nodes = batch.nodes
    out = build(batch, QLEN_ONLY, torch.empty(len(batch.drafts) * nodes * nodes, dtype=torch.bool))
    for i, draft in enumerate(batch.drafts):
        families = [[k for k, child in enumerate(draft.nodes) if child.parent is token] for token in draft.nodes]
        siblings = {elder: younger for family in families for elder, younger in pairwise(family)}
        assert out[1, i].tolist() == list(range(i * nodes, (i + 1) * nodes))
        assert out[2, i].tolist() == [family[0] if family else -1 for family in families]
        assert out[3, i].tolist() == [siblings.get(k, -1) for k in range(nodes)]
        for k, token in enumerate(draft.nodes):
            if set(token.line()) <= set(draft.nodes):
                assert out[0, i, k] == batch.seq_lens[i] + len(token.line()) - 1


@pytest.mark.slow
@given(batches())
@settings(deadline=None, max_examples=150)
def test_paths_of_tokens_follow_from_links(batch: Batch) -> None:
    bs, nodes = len(batch.drafts), batch.nodes
    _, _, first_child, next_sibling = build(batch, QLEN_ONLY, torch.empty(bs * nodes * nodes, dtype=torch.bool))
    tree = SimpleNamespace(
        draft_token=torch.arange(bs * nodes),  # each another
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        topk=batch.topk,
        spec_steps=batch.depth,
    )
    for i, (draft, paths) in enumerate(zip(batch.drafts, paths_of(tree).view(bs, nodes, -1).tolist(), strict=True)):
        for token, path in zip(draft.nodes, paths, strict=True):
            if set(line := token.line()) <= set(draft.nodes):
                expected = [i * nodes + draft.nodes.index(node) for node in line[:-1]]
                assert path == expected + [-1] * (batch.depth - len(expected))


@pytest.mark.parametrize("mode", [FULL_MASK, QLEN_ONLY])
@given(batches(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=75)
def test_a_node_sees_its_line_and_all_else_is_left_alone(mode: int, batch: Batch, random: Random) -> None:
    widths = [batch.nodes + (length if mode == FULL_MASK else 0) for length in batch.seq_lens]
    spare = 5  # upstream's buffer is as long as the longest batch needs
    mask = torch.tensor([random.random() < 0.5 for _ in range(sum(widths) * batch.nodes + spare)])
    before = mask.clone()
    build(batch, mode, mask)
    place = 0
    for draft, width in zip(batch.drafts, widths, strict=True):
        for token in draft.nodes:
            row, old = mask[place : place + width], before[place : place + width]
            place += width
            assert torch.equal(row[: -batch.nodes], old[: -batch.nodes])
            seen = {node for node, sees in zip(draft.nodes, row[-batch.nodes :], strict=True) if sees}
            if set(token.line()) <= set(draft.nodes):
                assert seen == set(token.line())
            else:  # its parent is missing: nothing comes of it, but it has to see something
                assert {token, draft.nodes[0]} <= seen
    assert torch.equal(mask[place:], before[place:])


def test_bit_packed_masks_are_refused() -> None:
    root = Token()
    batch = Batch(1, 1, 2, [Draft([], [0], [root, Token(0, root)])], [3])
    with pytest.raises(UnsupportedError, match="torch_native"):
        build(batch, 2, torch.empty(4, dtype=torch.bool))
