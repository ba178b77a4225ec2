"""The policy on the embedded model: its log-probabilities, and what an update does to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tlt_server.demo import default_paths
from tlt_server.demo.task import sample_texts

from tlt_grpo.batches import Trajectory
from tlt_grpo.config import Config
from tlt_grpo.errors import GrpoError
from tlt_grpo.policy import Policy

TARGET = default_paths()[0]


def policy(**settings: Any) -> Policy:
    defaults: dict[str, Any] = {"url": "", "model": str(TARGET), "out": Path()}
    return Policy(Config(**(defaults | settings)))


def trajectories(policy: Policy, count: int = 6) -> list[Trajectory]:
    """Worked solutions as if the policy had just sampled them; every other one is better than the mean."""
    made = []
    for number, text in enumerate(sample_texts(count, seed=3)):
        prompt, response = (policy.tokens(part) for part in text.split("\n", 1))
        with torch.no_grad():
            logprobs = policy.logprobs(torch.tensor([prompt + response]))[0, len(prompt) - 1 :]
        made.append(Trajectory(prompt, response, tuple(logprobs.tolist()), 1.0 if number % 2 else -1.0))
    return made


def gains(policy: Policy, some: list[Trajectory]) -> list[float]:
    """How much likelier each response has become, in nats."""
    with torch.no_grad():
        now = [policy.logprobs(torch.tensor([each.prompt + each.response]))[0, len(each.prompt) - 1 :] for each in some]
    return [row.sum().item() - sum(each.logprobs) for row, each in zip(now, some, strict=True)]


def test_logprobs_are_those_of_the_softmax() -> None:
    one = policy(temperature=0.7)
    tokens = torch.tensor([one.tokens("What is 3*4?\n3*4: 3*4=12 so 12\n")])
    with torch.no_grad():
        expected = (one.model(tokens).logits / 0.7).log_softmax(-1)
        for place, found in enumerate(one.logprobs(tokens)[0].tolist()):
            assert found == pytest.approx(expected[0, place, tokens[0, place + 1]].item(), abs=1e-5)


@pytest.mark.slow
def test_an_update_makes_better_responses_likelier_and_worse_ones_less_likely() -> None:
    one = policy(learning_rate=1e-4, kl=0.0)
    some = trajectories(one)
    learnt = one.learn(some, 1)
    assert learnt is not None
    assert learnt.mismatch < 1e-4
    assert (learnt.clipped, learnt.kl) == (0.0, pytest.approx(0.0, abs=1e-6))
    for each, gain in zip(some, gains(one, some), strict=True):
        assert gain * each.advantage > 0


@pytest.mark.slow
def test_what_fits_in_a_pass_changes_nothing() -> None:
    """Padding and batches are bookkeeping: the same update comes out."""
    states = []
    for limit in (1, 10_000):
        one = policy(learning_rate=1e-4, batch_tokens=limit)
        one.learn(trajectories(one), 1)
        states.append(one.model.state_dict())
    for name, weight in states[0].items():
        torch.testing.assert_close(weight, states[1][name], atol=2e-5, rtol=0)


@pytest.mark.slow
def test_several_updates_drift_from_what_was_sampled() -> None:
    one = policy(learning_rate=1e-3, updates=3)
    learnt = one.learn(trajectories(one), 1)
    assert learnt is not None
    assert learnt.mismatch < 1e-4
    assert learnt.drift > 1e-3


def test_nothing_is_learnt_where_no_response_is_better() -> None:
    one = policy()
    before = {name: weight.clone() for name, weight in one.model.state_dict().items()}
    assert one.learn([each._replace(advantage=0.0) for each in trajectories(one)], 1) is None
    assert all(torch.equal(weight, before[name]) for name, weight in one.model.state_dict().items())


@pytest.mark.slow
def test_a_penalty_holds_the_policy_near_its_start() -> None:
    moved = []
    for weight in (0.0, 100.0):
        one = policy(learning_rate=1e-4, kl=weight)
        some = trajectories(one)
        for step in range(4):
            learnt = one.learn(some, step)
        assert learnt is not None
        assert learnt.kl is not None
        moved.append(sum(abs(gain) for gain in gains(one, some)))
    assert moved[1] < moved[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_weights_in_the_dtype_of_the_sums(dtype: Any, tmp_path: Path) -> None:
    one = policy(dtype=dtype, learning_rate=1e-4)
    one.learn(trajectories(one), 1)
    one.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in one.model.state_dict().items():
        assert torch.equal(saved.pop(name), weight.to(getattr(torch, dtype)))
    assert not saved
    assert policy(model=str(tmp_path)).tokens("3*4") == one.tokens("3*4")


@pytest.mark.parametrize(
    ("settings", "said"), [({"model": "/no/such"}, "model=/no/such: "), ({"device": "cuda:77"}, "device=cuda:77: ")]
)
def test_what_cannot_be_loaded_is_named(settings: dict[str, str], said: str) -> None:
    with pytest.raises(GrpoError, match=said):
        policy(**settings)
