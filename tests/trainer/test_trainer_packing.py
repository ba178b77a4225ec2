"""What is packed comes out as if each sequence had been alone: values, gradients, attention, steps of chains."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.models import embedded, frozen, run_of
from tlt_server.trainer.learn.attention import Base, ChainAttention, by_sequence, by_sequence_one_step, flex
from tlt_server.trainer.learn.chains import draft
from tlt_server.trainer.learn.losses import EAGLE, EAGLE3, HASS, Objective, loss, step_means
from tlt_server.trainer.learn.packing import Run, join, pack, plan, split, within

CPU = torch.device("cpu")
LENGTHS = (2, 9, 17, 3)
LAST = torch.tensor([4] * 5 + [5] + [12] * 7)


def runs(kind: str = "eagle", lengths: tuple[int, ...] = LENGTHS) -> list[Run]:
    tokens = torch.randint(2, 290, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return [run_of(part, prompt=0, kind=kind) for part in tokens.split(lengths)]


def heads(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(heads, rows, 16, generator=generator) for heads in (4, 2, 2))


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """The textbook's: scores to every key of every step, a mask, a softmax."""
    key, value = (torch.cat(parts, dim=1).repeat_interleave(2, 0) for parts in (keys, values))
    scores = (query @ key.transpose(-1, -2) / 4).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "make", [lambda: by_sequence([(0, 5), (5, 6), (6, 13)]), lambda: flex(LAST)], ids=["by_sequence", "flex"]
)
@torch.compiler.set_stance("force_eager")
def test_chain_attention_is_a_masked_softmax_over_all_steps(make: type[Base]) -> None:
    attend, same = ChainAttention(make()), LAST[:, None] == LAST
    steps, visible = [heads(13, seed) for seed in range(3)], same & torch.ones(13, 13, dtype=torch.bool).tril()
    for step, (query, key, value) in enumerate(steps):
        if step:
            visible = torch.cat((visible, torch.eye(13, dtype=torch.bool)), dim=1)
        wanted = dense(query, [s[1] for s in steps[: step + 1]], [s[2] for s in steps[: step + 1]], visible)
        torch.testing.assert_close(attend(query, key, value), wanted, rtol=1e-5, atol=1e-5)


def test_attention_of_one_step_is_that_of_the_first_step() -> None:
    bounds, (query, key, value) = [(0, 5), (5, 6), (6, 13)], heads(13, seed=0)
    mixed, denominators = by_sequence_one_step(bounds)(query, key, value)
    torch.testing.assert_close(mixed, by_sequence(bounds)(query, key, value)[0])
    assert denominators.numel() == 0


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_steps_of_packed_chains_are_those_of_each_run_alone(kind: str) -> None:
    drafter, several = embedded(kind), runs(kind)
    together, alone = join(several), [join([run]) for run in several]
    steps = zip(
        draft(drafter, frozen(), together, 4), *(draft(drafter, frozen(), one, 4) for one in alone), strict=True
    )
    for packed, *parts in steps:
        counts = torch.cat([part.counts for part in parts])
        assert torch.equal(packed.counts, counts)
        reads = torch.cat([part.reads for part in parts])
        torch.testing.assert_close(packed.reads[counts], reads[counts], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "objective"), [("eagle", EAGLE), ("eagle", HASS), ("eagle3", EAGLE3)])
def test_packed_loss_and_gradients_are_those_of_runs_alone(kind: str, objective: Objective) -> None:
    drafter, several = embedded(kind), runs(kind)
    packed = loss(drafter, frozen(), join(several, fill=40), objective)
    alone = [join([run]) for run in several]
    means = zip(*(step_means(drafter, frozen(), one, objective) for one in alone), strict=True)
    total = torch.zeros(())
    for step, of_runs in enumerate(means):
        rows = [int(one.ahead(step)[1].sum()) for one in alone]
        mean = sum(mean * count for mean, count in zip(of_runs, rows, strict=True)) / sum(rows)
        total = total + objective.decay**step * mean
    total = total / sum(objective.decay**step for step in range(objective.steps))
    torch.testing.assert_close(packed, total)
    weights = list(drafter.parameters())
    for gradient, wanted in zip(*(torch.autograd.grad(x, weights) for x in (packed, total)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)


def test_no_run_can_change_another() -> None:
    """Not by a bit: the loss of one run has no gradient at what another holds."""
    first, second = runs(lengths=(9, 9))
    states = torch.cat((first.states, second.states)).requires_grad_()
    parts = [Run(r.tokens, s, r.finals) for r, s in zip((first, second), states.split((9, 9)), strict=True)]
    read = torch.stack([step.reads[:8].sum() for step in draft(embedded("eagle"), frozen(), join(parts), 3)]).sum()
    (gradient,) = torch.autograd.grad(read, states)
    assert gradient[:8].abs().sum() > 0
    assert gradient[9:].abs().sum() == 0


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 100))
def test_a_plan_holds_each_once_within_the_budget(sizes: list[int], budget: int) -> None:
    planned = plan(sizes, budget)
    assert sorted(index for part in planned for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in planned]
    assert all(load <= budget for load in loads)
    # two packs that would fit into one were never opened
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="31 entries do not fit into a pack of 30"):
        plan([3, 31], 30)


@given(st.integers(2, 40), st.integers(1, 12))
def test_a_split_run_keeps_every_entry_once(length: int, budget: int) -> None:
    tokens = torch.arange(length)
    parts = split(Run(tokens, tokens[:, None].float(), tokens[:, None].float(), first=3), budget)
    assert [part.entries for part in parts if part.entries > budget] == []
    joined = join(parts)
    assert joined.positions.tolist() == [3 + k for k in range(length - 1)]
    assert joined.states[:, 0].tolist() == list(range(length - 1))
    assert joined.tokens.tolist() == joined.finals[:, 0].tolist() == list(range(1, length))


@given(st.lists(st.integers(2, 30), max_size=20), st.integers(1, 100))
def test_what_is_within_a_budget_is_the_beginning_and_one_pack(lengths: list[int], budget: int) -> None:
    every = [Run(torch.arange(length), torch.zeros(length, 1), torch.zeros(length, 1)) for length in lengths]
    kept = within(every, budget)
    assert sum(run.entries for run in kept) == min(budget, sum(run.entries for run in every))
    assert [run.entries for run in kept[:-1]] == [run.entries for run in every[: len(kept)]][:-1]
    assert len(pack(kept, budget, torch.device("cpu"))) == min(1, len(kept))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_pack_is_all_on_its_device(kind: str) -> None:
    (one,) = pack(runs(kind), 64, torch.device("meta"))
    tensors = [value for value in vars(one).values() if isinstance(value, Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert [len(tensor) for tensor in tensors] == [sum(LENGTHS) - len(LENGTHS)] * 6


def test_chains_begin_where_a_server_drafts() -> None:
    """From the prompt's last token, which comes with the first sampled one; and stay within the run."""
    run = run_of(torch.arange(2, 12), prompt=4, kind="eagle")
    (one,) = pack([run], 64, CPU)
    assert one.ahead(0)[1].tolist() == [False] * 3 + [True] * 6
    assert one.ahead(4)[1].tolist() == [False] * 3 + [True] * 2 + [False] * 4
