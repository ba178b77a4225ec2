"""What tlt-client does of a step: weights that arrive whole or are refused, rollouts that go on after a pause."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tlt_client import Client, RequestRefused, Rollout, SamplingParams

from tests.server.conftest import PROMPTS
from tests.server.trainer import Tensors, Trainer, noisy, tensors_of, while_running
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()
BUCKET = 1 << 20
"""Bytes: the target, of 6 MB, goes in several."""
GREEDY = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
NORM = "model.norm.weight"

Send = Callable[..., None]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=8)


@pytest.fixture(autouse=True)
def restored(client: Client) -> Iterator[None]:
    client.update_weights_from_disk(str(TARGET), "start")
    yield
    client.update_weights_from_disk(str(TARGET), "default")


@pytest.fixture(params=["tensor", "group"])
def send(request: pytest.FixtureRequest, client: Client) -> Iterator[Send]:
    if request.param == "tensor":
        yield lambda tensors, *name: client.update_weights_from_tensor(tensors, *name, bucket_bytes=BUCKET)
        return
    groups = [client.init_weights_update_group(backend="gloo")]

    def broadcast(tensors: Tensors, *name: str) -> None:
        if groups[-1].lost:
            client.destroy_weights_update_group(groups[-1])
            groups.append(client.init_weights_update_group(backend="gloo"))
        client.update_weights_from_distributed(groups[-1], tensors, *name, bucket_bytes=BUCKET)

    yield broadcast
    client.destroy_weights_update_group(groups[-1])


@pytest.mark.parametrize("config", ["eagle-chain", "two-ranks"])
def test_weights_arrive_whole_in_one_publication(
    config: str, client: Client, trainer: Trainer, send: Send, moved: Path
) -> None:
    client.update_weights_from_disk(str(moved))
    wanted = trainer.checksums()
    client.update_weights_from_disk(str(TARGET), "start")
    seen, before = client.events()[-1].number, client.status().versions.target.version
    client.begin_weight_update()
    send(tensors_of(moved), "moved")
    client.end_weight_update()
    assert trainer.checksums() == wanted
    assert (client.weight_version(), client.status().versions.target.version) == ("moved", before + 1)
    (event,) = [each for each in client.events(seen) if each.kind == "target_published"]
    assert event.detail["calls"] > 2
    client.update_weight_version("renamed")
    assert client.generate(PROMPTS[0], GREEDY, version="renamed").weight_version == "renamed"


def test_a_torn_target_is_said_to_be_and_the_next_one_heals_it(
    client: Client, trainer: Trainer, send: Send, moved: Path
) -> None:
    tensors = tensors_of(moved)
    client.pause_generation("in_place")
    send({name: tensor for name, tensor in tensors.items() if name != NORM})
    with pytest.raises(RequestRefused, match=f"incomplete: its publication lacks {NORM}.*Send the whole target again"):
        client.continue_generation()
    client.begin_weight_update(allow_partial=True)
    send({name: tensors[name] for name in list(tensors)[:2]})
    with pytest.raises(RequestRefused, match="incomplete"):  # a part of what is there already heals nothing
        client.end_weight_update()
    client.begin_weight_update()
    send(tensors)
    client.end_weight_update()
    healed = trainer.checksums()
    client.update_weights_from_disk(str(moved))
    assert trainer.checksums() == healed


def test_a_refused_bucket_says_what_was_written_and_the_next_target_heals_it(
    client: Client, trainer: Trainer, send: Send
) -> None:
    before = trainer.checksums()
    bad = tensors_of(TARGET)
    last = list(bad)[-1]
    bad[last] = torch.full_like(bad[last], float("nan"))
    client.begin_weight_update()
    with pytest.raises(RequestRefused, match=rf"NaN or infinity in {last}.*\d buckets before it are written: send"):
        send(bad)
    with pytest.raises(RequestRefused, match="incomplete"):
        client.end_weight_update()
    client.begin_weight_update()
    send(tensors_of(TARGET))
    client.end_weight_update()
    assert trainer.checksums() == before


def test_memory_is_lent_and_the_target_sent_again(client: Client, trainer: Trainer, send: Send) -> None:
    before = trainer.checksums()
    client.release_memory_occupation(["kv_cache", "weights"])
    with pytest.raises(RequestRefused, match="released"):
        send(tensors_of(TARGET))
    client.resume_memory_occupation(["weights"])
    send(tensors_of(TARGET))
    client.resume_memory_occupation(["kv_cache"])
    assert client.generate(PROMPTS[0], GREEDY).completion_tokens == 400
    assert trainer.checksums() == before


def cut(client: Client, prompts: list[tuple[int, ...]]) -> list[Rollout]:
    """Rollouts that a pause has ended, and one that it came too late for; paused still."""

    def pause() -> None:
        while client.load().running < len(prompts):
            time.sleep(0.01)
        time.sleep(0.1)
        client.pause_generation()

    given: list[Rollout] = while_running(lambda: client.generate_batch(prompts, GREEDY, logprobs=True), pause)
    assert all(rollout.aborted and 0 < len(rollout.tokens) < 400 for rollout in given)
    return given


def test_a_rollout_goes_on_after_a_pause_as_if_there_had_been_none(client: Client, reference: Reference) -> None:
    prompts = [tuple(reference.tokens(prompt)) for prompt in PROMPTS[:4]]
    undisturbed = client.generate_batch(prompts, GREEDY, logprobs=True)
    partial = cut(client, prompts)
    client.continue_generation()
    whole = client.continue_batch(partial, prompts, GREEDY)
    for one, other in zip(whole, undisturbed, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert (one.prompt_tokens, one.completion_tokens) == (other.prompt_tokens, other.completion_tokens)
        assert one.weight_versions == other.weight_versions
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert one.spec is not None
        assert one.accept_length == pytest.approx(1 + one.spec.accepted_drafts / one.spec.verify_calls)
    assert client.continue_batch(whole, prompts, GREEDY) == whole


def test_a_rollout_that_goes_on_under_other_weights_says_which_sampled_what(
    client: Client, reference: Reference, moved: Path
) -> None:
    prompts = [tuple(reference.tokens(prompt)) for prompt in PROMPTS[:2]]
    partial = cut(client, prompts)
    client.update_weights_from_tensor(tensors_of(moved), "moved", bucket_bytes=BUCKET)
    client.continue_generation()
    for begun, rollout in zip(partial, client.continue_batch(partial, prompts, GREEDY), strict=True):
        first, second = rollout.weight_versions
        assert (first.version, second.version, second.partial) == ("start", "moved", False)
        assert (first.start, first.end, second.start, second.end) == (0, len(begun.tokens), first.end, 400)


def test_a_seed_that_the_server_ignores_is_named(client: Client) -> None:
    seeded = SamplingParams(max_new_tokens=4, sampling_seed=3)
    for rollout in client.generate_group(PROMPTS[0], 2, seeded):
        assert rollout.ignored in ((), ("sampling_seed",))
    assert "my_own" in client.generate(PROMPTS[0], seeded, extra={"my_own": 1}).ignored
