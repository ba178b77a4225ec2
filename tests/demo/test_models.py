"""The demo's models against transformers, and the parallel passes against one step at a time."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt_server.demo.checkpoint import load_target, save_target
from tlt_server.demo.tokens import END_ID
from tlt_server.demo.training import sampling
from tlt_server.demo.training.corpus import Sequence, contexts
from tlt_server.demo.training.evaluate import walk
from tlt_server.demo.training.model import Shape, Target
from tlt_server.demo.training.sampling import Cache, sample

SHAPE = Shape(vocab=40, hidden=64, heads=4, head_dim=16, mlp=96, context=64)


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    target = Target(SHAPE)
    target.requires_grad_(False)
    for weight in target.parameters():
        weight.mul_(4 if weight.dim() > 1 else 1)
    return target


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, SHAPE.vocab, (3, 12), generator=torch.Generator().manual_seed(1))


def test_checkpoint_is_the_same_model_in_transformers(target: Target, tokens: Tensor, tmp_path: Path) -> None:
    save_target(target, tmp_path)
    stored = load_target(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    hidden, _ = stored(tokens, SHAPE.rope(torch.arange(12)))
    torch.testing.assert_close(stored.lm_head(hidden), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_cache_gives_what_a_full_pass_gives(target: Target, tokens: Tensor) -> None:
    cos, sin = SHAPE.rope(torch.arange(12))
    hidden, _ = target(tokens, (cos, sin))
    cache = Cache(target, 3, 12)
    steps = [
        target(tokens[:, i, None], (cos[i, None], sin[i, None]), cache.attends(i))[0] for i in range(tokens.shape[1])
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_samples_follow_the_target(target: Target) -> None:
    prompts = [[5, 6], [7, 8, 9]] * 2000
    drawn = sample(target, prompts, seed=3, max_length=10, rows=1500)
    for prompt in prompts[:2]:
        hidden, _ = target(torch.tensor([prompt]), SHAPE.rope(torch.arange(len(prompt))))
        wanted = target.lm_head(hidden[0, -1]).softmax(-1).numpy()
        mine = [s for s, p in zip(drawn, prompts, strict=True) if p == prompt]
        seen = np.bincount([s.tokens[len(prompt)] for s in mine], minlength=SHAPE.vocab) / len(mine)
        assert all(s.tokens[: len(prompt)].tolist() == prompt for s in mine)
        # expected total variation of 2000 draws from 40 tokens is below half of sqrt(40 / 2000)
        assert np.abs(seen - wanted).sum() / 2 < np.sqrt(SHAPE.vocab / len(mine))
    assert all(len(s.tokens) == 10 or s.tokens[-1] == END_ID for s in drawn)
    assert all(END_ID not in s.tokens[:-1] for s in drawn)


def test_a_cache_that_grows_changes_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6], [7, 8, 9]] * 20
    monkeypatch.setattr(sampling, "COMPACT_EVERY", 4)
    roomy = sample(target, prompts, seed=3, max_length=30)
    monkeypatch.setattr(sampling, "FIRST_ROOM", 4)
    grown = sample(target, prompts, seed=3, max_length=30)
    assert [one.tokens.tolist() for one in grown] == [one.tokens.tolist() for one in roomy]
    assert max(len(one.tokens) for one in grown) > 16


def test_contexts_are_filled_with_whole_problems_but_for_the_last() -> None:
    problems = [Sequence(np.array([*[2 + n] * (3 + n), END_ID], dtype=np.int16), 2) for n in range(9)]
    drawn = [next(batches) for batches in [contexts(problems, {16: 1, 64: 1}, 64, seed=0)] for _ in range(40)]
    assert {tuple(len(one.tokens) for one in batch) for batch in drawn} == {(16,) * 4, (64,)}
    known = {one.tokens.tobytes() for one in problems}
    for one in (one for batch in drawn for one in batch):
        *whole, cut = np.split(one.tokens, np.flatnonzero(one.tokens == END_ID) + 1)
        assert {part.tobytes() for part in whole} <= known
        assert any(each.startswith(cut.tobytes()) for each in known)


@pytest.mark.parametrize(
    ("matches", "passes"),
    [
        (["111", "111", "111"], [3]),
        (["1111", "1111", "1111"], [3]),
        (["11111", "11111", "11111"], [3, 1]),
        (["000", "111", "111"], [0, 0, 0]),
        (["1010", "0100", "1101"], [2, 0]),
    ],
)
def test_walk_counts_accepted_drafts_of_each_pass(matches: list[str], passes: list[int]) -> None:
    counted = walk(np.array([[float(mark) for mark in row] for row in matches]))
    assert counted.tolist() == [sum(accepted >= k for accepted in passes) for k in range(4)]


def test_walk_expects_what_chances_give_on_average() -> None:
    hits = np.random.default_rng(3).random((2, 4))
    expected = np.zeros(3)
    for marks in product((0, 1), repeat=hits.size):
        found = np.array(marks).reshape(hits.shape)
        expected += np.where(found, hits, 1 - hits).prod() * walk(found)
    assert walk(hits) == pytest.approx(expected)
