"""Speculation does not change what is sampled: by exact enumeration of every coin, and by simulation.

A coin matters only through the masses that it is compared with. Where all masses are multiples of 1/GRID, a node's coin
can be replaced by the middles of GRID equal cells; the coin of the last token is compared with k / (mass that is left),
so its cells lie between neighbouring fractions of denominators up to GRID. What comes out is a distribution of exact
fractions, to be compared by `==` with the target's own.
"""

from collections import defaultdict
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from tlt_server.engine.cpu.verification import tree_speculative_sampling_target_only
from tlt_server.engine.sampling.filters import filter_probs

GRID = 6
EDGES = sorted({Fraction(k, left) for left in range(1, GRID + 1) for k in range(left + 1)})
FINAL_CELLS = [((low + high) / 2, high - low) for low, high in pairwise(EDGES)]

Tokens = tuple[int, ...]


class Tree:
    """A tree of proposals: each node's parent and token. The root has no parent, -1, and its token is no proposal."""

    def __init__(self, parents: list[int], tokens: list[int]) -> None:
        self.parents, self.tokens = parents, tokens
        self.families = [[k for k, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
        self.prefixes: list[Tokens] = [()]
        for parent, token in zip(parents[1:], tokens[1:], strict=True):
            self.prefixes.append((*self.prefixes[parent], token))
        self.depth = 1 + max(map(len, self.prefixes))

    def emit(
        self, target_probs: torch.Tensor, coins: torch.Tensor, final_coins: torch.Tensor, depth: int
    ) -> list[Tokens]:
        """What each row of coins emits: coins [bs, nodes], final_coins [bs]; target_probs [nodes, vocab]."""
        bs, nodes = coins.shape
        siblings = {elder: younger for family in self.families for elder, younger in pairwise(family)}
        each = [
            self.tokens,
            [family[0] if family else -1 for family in self.families],
            [siblings.get(k, -1) for k in range(nodes)],
        ]
        tokens, first_child, next_sibling = (torch.tensor(row).expand(bs, nodes) for row in each)
        predicts, accepted = torch.zeros(bs * nodes, dtype=torch.int32), torch.full((bs, depth), -1, dtype=torch.int32)
        tree_speculative_sampling_target_only(
            predicts,
            accepted,
            torch.zeros(bs, dtype=torch.int32),
            tokens,
            torch.arange(bs * nodes).view(bs, nodes),
            first_child,
            next_sibling,
            coins,
            final_coins,
            target_probs.expand(bs, -1, -1),
            torch.zeros(bs, nodes, 1),
        )
        said = predicts.tolist()
        return [tuple(said[node] for node in path if node >= 0) for path in accepted.tolist()]


@cache
def counts(seed: int, prefix: Tokens, vocab: int) -> Tokens:
    """The target after `prefix`, in units of 1/GRID; often with zeros, sometimes certain."""
    random = Random(f"{seed} {prefix}")
    units = [random.randrange(vocab) for _ in range(GRID)]
    return tuple(units.count(token) for token in range(vocab))


def probability(seed: int, sequence: Tokens, start: int, vocab: int) -> Fraction:
    """That the target, having said sequence[:start], goes on with the rest of it."""
    result = Fraction(1)
    for k in range(start, len(sequence)):
        result *= Fraction(counts(seed, sequence[:k], vocab)[sequence[k]], GRID)
    return result


def emitted_law(tree: Tree, seed: int, vocab: int, depth: int) -> dict[Tokens, Fraction]:
    """The probability of each sequence that one verification may emit, over all its coins."""
    target_probs = torch.tensor([counts(seed, prefix, vocab) for prefix in tree.prefixes]) / GRID
    inner = [node for node, family in enumerate(tree.families) if family]
    cases = list(product(*[range(GRID)] * len(inner), FINAL_CELLS))
    coins = torch.full((len(cases), len(tree.parents)), 0.5)
    coins[:, inner] = (torch.tensor([case[:-1] for case in cases]) + 0.5) / GRID
    final_coins = torch.tensor([float(middle) for *_, (middle, _) in cases])
    law: dict[Tokens, Fraction] = defaultdict(Fraction)
    for emitted, (*_, (_, width)) in zip(tree.emit(target_probs, coins, final_coins, depth), cases, strict=True):
        law[emitted] += width / GRID ** len(inner)
    return law


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, int]:
    """(tree, vocab): up to 3 nodes with children, up to 4 deep, any proposals, the same one twice among them."""
    vocab, parents = draw(st.integers(2, 4)), [-1]
    for node in range(1, draw(st.integers(2, 7))):
        inner = sorted(set(parents[1:]))
        parents.append(draw(st.sampled_from(inner) if len(inner) == 3 else st.integers(0, node - 1)))
    return Tree(parents, [draw(st.integers(0, vocab - 1)) for _ in parents]), vocab


@pytest.mark.slow
@example((Tree([-1, 0, 1, 2], [0, 0, 1, 2]), 4), 1, False)  # a chain
@example((Tree([-1, 0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 0, 3, 1, 2]), 4), 2, False)  # topk 3, then 2 below the two best
@example((Tree([-1, 0, 0, 1], [0, 2, 2, 0]), 3), 3, False)  # the same token twice
@example((Tree([-1, 0, 1], [0, 0, 1]), 3), 4, True)  # a path cut short of the tree's depth
@given(trees(), st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_sequence_has_exactly_the_targets_probability(case: tuple[Tree, int], seed: int, cut: bool) -> None:
    tree, vocab = case
    depth = tree.depth - cut
    law = emitted_law(tree, seed, vocab, depth)
    assert sum(law.values()) == 1
    for sequence in product(range(vocab), repeat=depth):
        begun = [(sequence[:n], n) for n in range(1, depth + 1)]
        spoken = sum(
            (law.get(part, Fraction(0)) * probability(seed, sequence, n, vocab) for part, n in begun), Fraction(0)
        )
        assert spoken == probability(seed, sequence, 0, vocab), sequence


SAMPLES = 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [Tree([-1, 0, 1, 2], [0, 0, 2, 1]), Tree([-1, 0, 0, 0, 1, 1, 3], [0, 4, 0, 5, 0, 1, 2])],
    ids=["chain", "tree"],
)
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_ks": 4}, {"top_ps": 0.8}, {"min_ps": 0.2}, {"top_ks": 5, "top_ps": 0.9, "min_ps": 0.05}],
    ids=["plain", "top-k", "top-p", "min-p", "all"],
)
def test_simulated_sequences_pass_a_chi_squared_test(tree: Tree, filters: dict[str, Any]) -> None:
    """The first two tokens, over a vocabulary of 6, against the target's law, with fixed seeds.

    A right kernel fails with probability 1e-6 per choice of seed. A kernel at a total variation of d from the target
    adds at least SAMPLES * (2 d)^2 to the statistic in the mean (Cauchy-Schwarz: sum of (difference^2 / expected) >=
    (sum of |difference|)^2), which is 128 at d = 0.04, where the bound is at most 90 (35 degrees of freedom).
    """
    vocab, generator = 6, torch.Generator().manual_seed(7)
    logits = {
        prefix: torch.randn(vocab, generator=generator) for n in range(4) for prefix in product(range(vocab), repeat=n)
    }
    columns = {name: torch.tensor([value]) for name, value in filters.items()}
    rows = {prefix: filter_probs((logit / 0.8).softmax(-1)[None], **columns)[0] for prefix, logit in logits.items()}
    target_probs = torch.stack([rows[prefix] for prefix in tree.prefixes])
    coins = torch.rand(SAMPLES, len(tree.parents), generator=generator)
    emitted = tree.emit(target_probs, coins, torch.rand(SAMPLES, generator=generator), tree.depth)
    seconds = (
        torch.stack([rows[sequence[:1]] for sequence in emitted]).multinomial(1, generator=generator)[:, 0].tolist()
    )
    observed: dict[Tokens, int] = defaultdict(int)
    for sequence, second in zip(emitted, seconds, strict=True):
        observed[sequence[:2] if len(sequence) > 1 else (*sequence, second)] += 1
    expected = {(a, b): SAMPLES * float(rows[()][a] * rows[(a,)][b]) for a, b in product(range(vocab), repeat=2)}
    assert [pair for pair in observed if expected[pair] == 0] == []
    possible = [pair for pair in expected if expected[pair] > 0]
    statistic = sum((observed[pair] - expected[pair]) ** 2 / expected[pair] for pair in possible)
    assert statistic < chi2.ppf(1 - 1e-6, len(possible) - 1)
