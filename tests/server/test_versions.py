"""Each token is credited to the weights that sampled it: its logprob is the one that those weights give it."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tlt_client import Client, SamplingParams, VersionConflict

from tests.server.conftest import PROMPTS
from tests.server.trainer import DRAFTERS, Trainer, noisy, tensors_of, until_under_way, while_running
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("plain")

TARGET, _ = default_paths()
LENGTH = 400  # so that all still decode at the second update, on a busy machine too


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Targets that differ plainly, so that a token credited to the wrong one has another logprob."""
    folder = tmp_path_factory.mktemp("targets")
    return [TARGET, *(noisy(TARGET, folder / str(seed), seed, scale=0.1) for seed in (1, 2))]


def logprobs(reference: Reference, prompt: str, tokens: tuple[int, ...]) -> torch.Tensor:
    logits = reference.along(reference.tokens(prompt), tokens)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("config", ["eagle-chain", "plain"])
def test_every_token_is_credited_to_the_weights_that_sampled_it(
    trainer: Trainer, url: str, config: str, targets: list[Path]
) -> None:
    """Weights change twice in mid-flight; requests are retracted, so that each token's prefix is of its own weights."""
    before = trainer.http.get("/tlt/v1/status").json()["versions"]
    first, drafter = before["target"]["version"], (before["drafter"] or {"live": {}})["live"].get("version")

    def updates() -> None:
        for k, model in enumerate(targets[1:], 1):
            until_under_way(trainer, 8)
            time.sleep(0.2)
            trainer.post("/pause_generation", mode="retract").raise_for_status()
            trainer.tensor(tensors_of(model), weight_version=f"target {k}").raise_for_status()
            trainer.post("/continue_generation").raise_for_status()

    with Client(url) as client:
        sampling = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
        given = while_running(lambda: client.generate_batch(PROMPTS[:8], sampling, logprobs=True), updates)
        trainer.disk(TARGET).raise_for_status()
    references = [Reference(model) for model in targets]
    seen: set[int] = set()
    for prompt, rollout in zip(PROMPTS[:8], given, strict=True):
        exact = [logprobs(reference, prompt, rollout.tokens) for reference in references]
        for span in rollout.weight_versions:
            which = span.target_version - first
            seen.add(which)
            assert not span.partial
            assert span.version == (f"target {which}" if which else before["target"]["weight_version"])
            part = slice(span.start, span.end)
            torch.testing.assert_close(torch.tensor(rollout.logprobs[part]), exact[which][part], atol=1e-4, rtol=0)
        assert rollout.weight_versions[-1].end == LENGTH
        drafted = [(span.start, span.end, span.version) for span in rollout.drafter_versions]
        assert drafted == ([] if config == "plain" else [(0, LENGTH, drafter)])
    assert seen == {0, 1, 2}


def test_a_stream_says_its_versions_too(client: Client) -> None:
    *_, last = client.stream(PROMPTS[0], SamplingParams(max_new_tokens=20, ignore_eos=True))
    versions = client.status().versions
    assert last.rollout is not None
    (span,) = last.rollout.weight_versions
    assert versions is not None
    assert (span.start, span.end, span.target_version) == (0, 20, versions.target.version)
    assert span.version == versions.target.weight_version


def test_a_request_gets_the_version_that_it_needs_or_none(trainer: Trainer) -> None:
    """On every route; many at once share the question to the scheduler."""
    trainer.post("/update_weight_version", new_version="needed").raise_for_status()
    asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 4}
    with Client(str(trainer.http.base_url)) as client:
        number = client.status().versions.target.version
        short = SamplingParams(max_new_tokens=4)
        for version in ("needed", number):
            rollouts = client.generate_group(PROMPTS[0], 32, short, version=version)
            assert {rollout.weight_versions[0].version for rollout in rollouts} == {"needed"}
        for version in ("another", number + 1):
            with pytest.raises(VersionConflict, match="'needed' is, target_version"):
                client.generate(PROMPTS[0], short, version=version)
        trainer.post("/begin_weight_update").raise_for_status()
        trainer.disk(TARGET, weight_version="next").raise_for_status()
        with pytest.raises(VersionConflict, match="under way"):
            client.generate(PROMPTS[0], short, version="next")
        trainer.post("/end_weight_update").raise_for_status()
        assert client.generate(PROMPTS[0], short, version="next").weight_versions[0].target_version == number + 1
    for header, status in (({}, 200), ({"X-TLT-Weight-Version": "next"}, 200), ({"x-tlt-target-version": "0"}, 409)):
        assert trainer.http.post("/v1/completions", json=asked, headers=header).status_code == status
    answer = trainer.http.post("/v1/completions", json=asked, headers={"x-tlt-target-version": "-1"})
    assert (answer.status_code, "is not a number" in answer.json()["message"]) == (400, True)


def test_the_openai_route_is_as_it_was(trainer: Trainer) -> None:
    """Its answers carry no meta_info; a request credited all the same must not upset it."""
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 8, "stream": True}
    answer = trainer.http.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_a_server_without_a_drafter_says_so(trainer: Trainer) -> None:
    assert trainer.http.get("/tlt/v1/drafter").status_code == 404
    answer = trainer.drafter(DRAFTERS["eagle-chain"])
    assert answer.status_code == 409
    assert "without a drafter" in answer.json()["message"]
    assert trainer.http.get("/tlt/v1/status").json()["versions"]["drafter"] is None
