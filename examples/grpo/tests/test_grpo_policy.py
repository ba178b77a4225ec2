"""The policy on the embedded model: its log-probabilities, and what an update does to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tlt_server.demo import default_paths
from tlt_server.demo.task import sample_texts

from tlt_grpo.config import Config
from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.batches import Trajectory, pack
from tlt_grpo.learning.policy import Policy

TARGET = default_paths()[0]


def policy(**settings: Any) -> Policy:
    defaults: dict[str, Any] = {"url": "", "model": str(TARGET), "out": Path()}
    return Policy(Config(**(defaults | settings)))


def logprobs(policy: Policy, one: Trajectory) -> list[float]:
    with torch.no_grad():
        return policy.logprobs(pack([one], "cpu")).tolist()


def trajectories(policy: Policy, count: int = 6, seed: int = 3) -> list[Trajectory]:
    """Worked solutions as if the policy had just sampled them; every other one is better than the mean."""
    made = []
    for number, text in enumerate(sample_texts(count, seed)):
        prompt, response = (policy.tokens(part) for part in text.split("\n", 1))
        one = Trajectory(prompt, response, (0.0,) * len(response), 1.0 if number % 2 else -1.0)
        made.append(one._replace(logprobs=tuple(logprobs(policy, one))))
    return made


def gains(policy: Policy, some: list[Trajectory]) -> list[float]:
    """How much likelier each response has become, in nats."""
    return [sum(logprobs(policy, each)) - sum(each.logprobs) for each in some]


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
    """Packs are bookkeeping: the same update comes out."""
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
def test_rates_that_bfloat16_would_lose_are_not_lost() -> None:
    """Updates of 1e-6 leave most bfloat16 weights as they are, and still add up."""
    one = policy(dtype="bfloat16", learning_rate=1e-6)
    assert {weight.dtype for weight in one.weights().values()} == {torch.bfloat16}
    before = [each.detach().clone() for each in one.masters.all]
    for step in range(3):
        one.learn(trajectories(one), step)
    for master, was, weight in zip(one.masters.all, before, one.weights().values(), strict=True):
        assert (master - was).abs().max() > 1.5e-6
        assert torch.equal(weight, master.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_goes_on_is_one_that_was_never_broken_off(dtype: Any, tmp_path: Path) -> None:
    whole, broken = (policy(dtype=dtype, learning_rate=1e-4, updates=2) for _ in range(2))
    given = [trajectories(whole, seed=seed) for seed in range(2)]
    for step, some in enumerate(given):
        whole.learn(some, step)
    broken.learn(given[0], 0)
    broken.keep(tmp_path / "state.pt", 1)
    other = policy(dtype=dtype, learning_rate=1e-4, updates=2)
    assert other.go_on(tmp_path / "state.pt") == 1
    other.learn(given[1], 1)
    for name, weight in whole.weights().items():
        assert torch.equal(weight, other.weights()[name])


def test_what_cannot_be_gone_on_from_is_named(tmp_path: Path) -> None:
    one = policy()
    with pytest.raises(GrpoError, match="nothing to resume from"):
        one.go_on(tmp_path / "state.pt")
    one.keep(tmp_path / "state.pt", 1)
    with pytest.raises(GrpoError, match=r"^learning_rate=0.5: the run in .* has 1e-05"):
        policy(learning_rate=0.5).go_on(tmp_path / "state.pt")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_weights(dtype: Any, tmp_path: Path) -> None:
    one = policy(dtype=dtype, learning_rate=1e-4)
    one.learn(trajectories(one), 1)
    one.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in one.model.state_dict().items():
        assert torch.equal(saved.pop(name), weight)
    assert not saved
    assert policy(model=str(tmp_path)).tokens("3*4") == one.tokens("3*4")


@pytest.mark.parametrize(
    ("settings", "said"), [({"model": "/no/such"}, "model=/no/such: "), ({"device": "cuda:77"}, "device=cuda:77: ")]
)
def test_what_cannot_be_loaded_is_named(settings: dict[str, str], said: str) -> None:
    with pytest.raises(GrpoError, match=said):
        policy(**settings)
