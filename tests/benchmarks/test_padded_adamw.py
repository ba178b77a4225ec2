"""What a padded model learns is what the small model in it learns by itself; the padding stays as it is."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.padded_adamw import PaddedAdamW, blocks
from benchmarks.models.padding import Padding
from tlt_server.demo.training.model import Shape, Target

SMALL = Shape(vocab=40, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=96, context=256)
LARGE = Shape(vocab=64, hidden=80, layers=4, heads=6, kv_heads=2, head_dim=32, mlp=256, context=256)


class Both(NamedTuple):
    small: Target
    padded: Target
    padding: Padding


def both(dtype: torch.dtype, large: Shape = LARGE) -> Both:
    """A small model whose attention, units and norms all matter, and the same one padded."""
    torch.manual_seed(0)
    small = Target(SMALL).to(dtype)
    for name, weight in small.named_parameters():
        weight.data = 1 + 0.2 * torch.randn_like(weight) if "norm" in name else 6 * weight.data
    padding = Padding(SMALL, large, dtype, "cpu", 0)
    padded = Target(padding.large).to(dtype)
    padded.load_state_dict(dict(padding.target({name: each.detach() for name, each in small.state_dict().items()})))
    return Both(small, padded, padding)


def laws(model: Target, tokens: Tensor) -> Tensor:
    rope = tuple(each.to(model.lm_head.weight.dtype) for each in model.shape.rope(torch.arange(tokens.shape[1])))
    states, _ = model(tokens, rope)
    return model.lm_head(states).log_softmax(-1)[..., : SMALL.vocab]


class Task:
    """GRPO's objective on sequences that the small model is said to have sampled."""

    def __init__(self, small: Target) -> None:
        torch.manual_seed(1)
        self._tokens = torch.randint(0, SMALL.vocab, (8, 48))
        self._gains = torch.randn(8, 1, dtype=small.lm_head.weight.dtype)
        self._held_out = torch.randint(0, SMALL.vocab, (16, 64))
        with torch.no_grad():
            self._old = self._logprobs(small)

    def loss(self, model: Target, rows: slice | list[int] = slice(None)) -> Tensor:
        ratio = (self._logprobs(model)[rows] - self._old[rows]).exp()
        gains = self._gains[rows]
        return -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.28) * gains).sum() / self._old.numel()

    def apart(self, one: Target, other: Target) -> float:
        """The largest difference of a held-out log-probability."""
        with torch.no_grad():
            return (laws(one, self._held_out) - laws(other, self._held_out)).abs().max().item()

    def _logprobs(self, model: Target) -> Tensor:
        return laws(model, self._tokens[:, :-1]).gather(-1, self._tokens[:, 1:, None])[..., 0]


def alone(model: nn.Module, loss: Callable[[], Tensor], updates: int, rate: float) -> None:
    """The small model's own AdamW."""
    adam = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    for _ in range(updates):
        adam.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_forty_updates_are_those_of_the_small_model_alone(dtype: torch.dtype, bound: float, rate: float) -> None:
    """Found were 2.6e-6 and 1e-14, where they moved by 0.2 and more."""
    small, padded, padding = both(dtype)
    task, start, mine = Task(small), copy.deepcopy(small), copy.deepcopy(small)
    optimiser = PaddedAdamW(padded, mine, padding, rate)
    alone(small, lambda: task.loss(small), 40, rate)
    for _ in range(40):
        task.loss(padded).backward()
        task.loss(mine).backward()
        optimiser.step()
        assert optimiser.cosine == pytest.approx(1, abs=1e-6)
    assert task.apart(small, start) > 0.1
    assert task.apart(padded, small) < bound
    assert optimiser.changed() == []


def test_adamw_on_all_of_it_destroys_the_padding() -> None:
    """Why all this is: the same few updates by torch's own."""
    small, padded, padding = both(torch.float32)
    task, watch = Task(small), PaddedAdamW(padded, copy.deepcopy(small), padding)
    alone(small, lambda: task.loss(small), 2, 1e-4)
    alone(padded, lambda: task.loss(padded), 2, 1e-4)
    assert task.apart(padded, small) > 0.1
    assert len(watch.changed()) > 10


@pytest.mark.slow
def test_gradients_of_several_passes_add_up() -> None:
    small, padded, padding = both(torch.float64)
    task, mine = Task(small), copy.deepcopy(small)
    optimiser = PaddedAdamW(padded, mine, padding, 1e-3)
    alone(small, lambda: task.loss(small), 3, 1e-3)
    for _ in range(3):
        for rows in (slice(0, 3), slice(3, 8)):
            task.loss(padded, rows).backward()
            optimiser.gather()
        optimiser.step()
    assert optimiser.cosine is None
    assert task.apart(padded, small) < 1e-12


@pytest.mark.slow
def test_bfloat16_follows_within_its_rounding_and_loses_no_small_rate() -> None:
    """The padded weights are P of the small ones, rounded; the small ones move by less than bfloat16 can say."""
    small, padded, padding = both(torch.float32)
    padded.to(torch.bfloat16)
    task, mine = Task(small), copy.deepcopy(small)
    optimiser = PaddedAdamW(padded, mine, padding, 1e-6)
    for _ in range(3):
        task.loss(padded).float().backward()
        task.loss(mine).backward()
        optimiser.step()
        assert optimiser.cosine is not None
        assert optimiser.cosine > 0.98
    moved = max(
        (one - other).abs().max().item() for one, other in zip(small.parameters(), mine.parameters(), strict=True)
    )
    assert 1e-6 < moved < 4e-6
    weights = dict(padded.named_parameters())
    for name, block in blocks(dict(mine.named_parameters()), padding, torch.device("cpu")).items():
        expected = dict(mine.named_parameters())[name].detach() * block.scale
        assert torch.equal(block.of(weights[block.name]), expected.to(torch.bfloat16))
    assert optimiser.changed() == []


def test_all_of_the_large_models_moments_are_passed_over() -> None:
    small, padded, padding = both(torch.float32)
    optimiser = PaddedAdamW(padded, copy.deepcopy(small), padding)
    Task(small).loss(padded).backward()
    optimiser.step()
    state = optimiser._full.state
    assert len(state) == len(list(padded.parameters()))
    assert sum(each["exp_avg"].numel() for each in state.values()) == sum(each.numel() for each in padded.parameters())
    assert all(each["step"] == 1 and not each["exp_avg"].any() for each in state.values())


def test_it_goes_on_from_its_state() -> None:
    task, ended = None, []
    for broken in (False, True):
        small, padded, padding = both(torch.float32)
        task = task or Task(small)
        optimiser = PaddedAdamW(padded, small, padding, 1e-3)
        for number in range(4):
            if broken and number == 2:
                state = copy.deepcopy(optimiser.state_dict())
                small, padded, padding = both(torch.float32)
                optimiser = PaddedAdamW(padded, small, padding, 1e-3)
                optimiser.load_state_dict(state)
            task.loss(padded).backward()
            optimiser.step()
        ended.append(padded)
    assert all(torch.equal(*pair) for pair in zip(*(each.parameters() for each in ended), strict=True))


def test_a_wrong_bit_of_the_padding_is_noticed() -> None:
    small, padded, padding = both(torch.float32)
    optimiser = PaddedAdamW(padded, small, padding)
    weight = padded.lm_head.weight.data
    weight[50, [3, 4]] = weight[50, [4, 3]]
    assert optimiser.changed() == ["lm_head.weight"]


def test_biases_of_the_large_model_stay_nothing() -> None:
    """Qwen2's shape has them, the small model has none."""
    small, padded, padding = both(torch.float32, replace(LARGE, heads=8))
    bias = nn.Parameter(torch.zeros(4))
    padded.register_parameter("bias", bias)
    optimiser = PaddedAdamW(padded, small, padding)
    (Task(small).loss(padded) + bias.sum()).backward()
    optimiser.step()
    assert not bias.any()
    assert optimiser.changed() == []
