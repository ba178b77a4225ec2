"""MTP heads: greedy answers stay the target's, and the head is the one that was published with it, by each route that
a CPU can do."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tlt_client import Client, StrategyUpdate

from benchmarks.models import heads as mtp
from benchmarks.models.families import PROMPTS, answered, counted, expected
from tests.server.trainer import Trainer, buckets, tensors_of, while_running
from tests.server.warm import warm_server
from tlt_server.drafter.mtp import own_names, require_head
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config

CHAIN = ["--drafter", "mtp", "--arm", "3,1,4", "--max-total-tokens", "4096", "--watchdog", "observe"]


class Served(NamedTuple):
    """A server of the first target; a head of the one guesses what is least likely to the other."""

    trainer: Trainer
    url: str
    first: Path
    second: Path

    def accept_length(self) -> float:
        before, _, after = counted(self.url), answered(self.url), counted(self.url)
        return 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / (after["drafts"] - before["drafts"])

    def head(self) -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{self.url}/tlt/v1/drafter").raise_for_status().json()["live"]
        return found

    def assert_follows(self, target: Path) -> None:
        assert answered(self.url) == expected(target)
        assert self.accept_length() > 3.5


@contextmanager
def served(family: str, folder: Path, *flags: str) -> Iterator[Served]:
    first, second = (mtp.target(family, folder / str(seed), seed, sign) for seed, sign in ((0, 1), (1, -1)))
    arguments = ["--model-path", str(first), *CHAIN, *flags]
    with warm_server(arguments, folder / "server.log") as url, closing(Trainer(url)) as trainer:
        yield Served(trainer, url, first, second)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(mtp.MIMO, tmp_path_factory.mktemp("mimo")) as mimo:
        yield mimo


def head_names(target: Path) -> list[str]:
    return own_names(read_config(target), tensors_of(target))


def whole(served: Served, target: Path) -> None:
    served.trainer.disk(target).raise_for_status()
    served.assert_follows(target)


def in_session(send: Callable[[Trainer, mtp.Tensors], httpx.Response]) -> Callable[[Trainer, Path], None]:
    def publish(trainer: Trainer, target: Path) -> None:
        trainer.post("/begin_weight_update").raise_for_status()
        for part in buckets(tensors_of(target), 3):
            send(trainer, part).raise_for_status()
        trainer.post("/end_weight_update").raise_for_status()

    return publish


ROUTES: dict[str, Callable[[Trainer, Path], object]] = {
    "disk": lambda trainer, target: trainer.disk(target).raise_for_status(),
    "tensor": in_session(lambda trainer, part: trainer.tensor(part)),
    "bucket": in_session(lambda trainer, part: trainer.bucket(part, selector="all")),
    "distributed": in_session(lambda trainer, part: trainer.distributed(part)),
}


@pytest.mark.server
@pytest.mark.parametrize("route", ROUTES)
def test_the_head_follows_the_target_by_every_route_under_load(mimo: Served, route: str) -> None:
    whole(mimo, mimo.first)
    version = mimo.head()["version"]
    long = {"input_ids": PROMPTS, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    answer = while_running(
        lambda: httpx.post(f"{mimo.url}/generate", json=long, timeout=60),
        lambda: ROUTES[route](mimo.trainer, mimo.second),
    )
    assert all(len(each["output_ids"]) == 300 for each in answer.raise_for_status().json())
    mimo.assert_follows(mimo.second)
    status = httpx.get(f"{mimo.url}/tlt/v1/status").json()["versions"]
    assert mimo.head() == mimo.head() | {"version": version + 1, "trained_on": status["target"]["version"]}


@pytest.mark.server
def test_one_seed_gives_one_sample(mimo: Served) -> None:
    """Drafted or not; at a temperature at which the target is seldom sure."""
    whole(mimo, mimo.first)
    params = [
        {"temperature": 20, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": seed}
        for seed in range(len(PROMPTS))
    ]

    def sampled() -> list[list[int]]:
        answer = httpx.post(f"{mimo.url}/generate", json={"input_ids": PROMPTS, "sampling_params": params}, timeout=60)
        return [each["output_ids"] for each in answer.raise_for_status().json()]

    before, drafted, after = counted(mimo.url), sampled(), counted(mimo.url)
    assert after["drafts"] > before["drafts"]
    assert after["accepted_tokens"] > before["accepted_tokens"]
    with Client(mimo.url) as client:
        client.set_strategy(StrategyUpdate("off"))
        plain = sampled()
        client.set_strategy(StrategyUpdate("pinned"))
    assert counted(mimo.url)["drafts"] == after["drafts"]
    assert drafted == plain
    assert len({tuple(each[:8]) for each in plain}) == len(PROMPTS)


@pytest.mark.server
def test_target_and_head_in_sessions_of_their_own(mimo: Served) -> None:
    """As SkyRL's two sessions a step. The target alone leaves its head behind."""
    whole(mimo, mimo.first)
    target = httpx.get(f"{mimo.url}/tlt/v1/status").json()["versions"]["target"]["version"]
    for selector, follows in (("target", False), ("draft", True)):
        mimo.trainer.post("/begin_weight_update", selector=selector).raise_for_status()
        for part in buckets(tensors_of(mimo.second), 2):
            mimo.trainer.bucket(part).raise_for_status()
        mimo.trainer.post("/end_weight_update").raise_for_status()
        assert answered(mimo.url) == expected(mimo.second)
        assert (mimo.accept_length() > 3.5) == follows
    assert httpx.get(f"{mimo.url}/tlt/v1/status").json()["versions"]["target"]["version"] == target + 1
    mimo.trainer.disk(mimo.first, selector="target").raise_for_status()
    assert mimo.accept_length() < 1.5
    mimo.trainer.disk(mimo.first, selector="draft").raise_for_status()
    mimo.assert_follows(mimo.first)


@pytest.mark.server
def test_a_publication_without_the_head_says_that_it_stays(mimo: Served) -> None:
    whole(mimo, mimo.first)
    head = mimo.head()
    names = head_names(mimo.second)
    bare = {name: each for name, each in tensors_of(mimo.second).items() if name not in names}
    answer = mimo.trainer.tensor(bare).raise_for_status().json()
    assert answer["success"]
    assert f"The MTP head stays version {head['version']}: nothing of it was sent" in answer["message"]
    assert mimo.head() == head
    assert answered(mimo.url) == expected(mimo.second)
    assert mimo.accept_length() < 1.5


@pytest.mark.server
def test_half_a_head_is_refused_and_the_next_whole_one_heals(mimo: Served, tmp_path: Path) -> None:
    whole(mimo, mimo.first)
    head = mimo.head()
    tensors = tensors_of(mimo.second)
    gone = head_names(mimo.second)[0]
    del tensors[gone]
    mimo.trainer.post("/begin_weight_update").raise_for_status()
    mimo.trainer.tensor(tensors).raise_for_status()
    ended = mimo.trainer.post("/end_weight_update")
    assert ended.status_code >= 400
    assert gone in ended.text
    assert (mimo.head(), answered(mimo.url)) == (head, expected(mimo.second))
    # nor may the half that came and another publication's half make one
    mimo.trainer.post("/begin_weight_update", allow_partial=False).raise_for_status()
    mimo.trainer.tensor({gone: tensors_of(mimo.first)[gone]}, selector="draft").raise_for_status()
    assert mimo.trainer.post("/end_weight_update").status_code >= 400
    assert mimo.head() == head
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((mimo.second / name).read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = mimo.trainer.disk(tmp_path)
    assert refused.status_code == 400
    assert f"{gone}: not there" in refused.text
    assert mimo.trainer.disk(tmp_path, selector="draft").status_code == 400
    assert mimo.head() == head
    whole(mimo, mimo.second)


@pytest.mark.server
def test_what_does_not_fit_the_head_is_refused_before_anything_is_written(mimo: Served) -> None:
    whole(mimo, mimo.first)
    before, tensors = mimo.trainer.checksums(), tensors_of(mimo.second)
    name = next(name for name in head_names(mimo.second) if tensors[name].dim() > 1)
    for wrong in (tensors[name][:-1], tensors[name] * float("nan")):
        answer = mimo.trainer.tensor(tensors | {name: wrong.contiguous()})
        assert answer.status_code == 400
        assert name in answer.text
        assert mimo.trainer.checksums() == before
    for fields in ({"selector": "draft"}, {"selector": "draft", "load_format": "direct"}):
        answer = mimo.trainer.tensor({"model.norm.weight": tensors["model.norm.weight"]}, **fields)
        assert answer.status_code == 400
        assert mimo.trainer.checksums() == before
    mimo.assert_follows(mimo.first)


@pytest.mark.server
def test_a_part_of_the_head_in_a_session_of_parts_leaves_the_rest(mimo: Served) -> None:
    whole(mimo, mimo.first)
    name = "model.mtp_layers.0.final_layernorm.weight"
    for target, follows in ((mimo.second, False), (mimo.first, True)):
        mimo.trainer.post("/begin_weight_update", allow_partial=True).raise_for_status()
        mimo.trainer.tensor({name: tensors_of(target)[name]}).raise_for_status()
        mimo.trainer.post("/end_weight_update").raise_for_status()
        assert answered(mimo.url) == expected(mimo.first)
        assert (mimo.accept_length() > 3.5) == follows


@pytest.mark.server
def test_it_is_frozen_and_rolled_back_as_other_drafters_are(mimo: Served) -> None:
    whole(mimo, mimo.first)
    head = mimo.head()
    mimo.trainer.post("/tlt/v1/drafter/freeze", frozen=True).raise_for_status()
    message = mimo.trainer.disk(mimo.second).raise_for_status().json()["message"]
    assert "it is frozen" in message
    assert mimo.head() == head
    mimo.trainer.post("/tlt/v1/drafter/freeze", frozen=False).raise_for_status()
    whole(mimo, mimo.second)
    mimo.trainer.post("/tlt/v1/drafter/rollback").raise_for_status()
    assert mimo.head() == head
    assert answered(mimo.url) == expected(mimo.second)
    assert mimo.accept_length() < 1.5
    refused = mimo.trainer.drafter(mimo.second, version=99)
    assert refused.status_code == 400
    assert 'mtp = "updates"' in refused.json()["message"]


@pytest.mark.server
def test_glm_whose_head_is_a_mixture_of_experts_by_a_tree(tmp_path: Path) -> None:
    with served(mtp.GLM, tmp_path, "--arm", "4,2,6") as glm:
        glm.assert_follows(glm.first)
        whole(glm, glm.second)


@pytest.mark.server
def test_a_head_that_updates_bring_is_left_by_publications(tmp_path: Path) -> None:
    (tmp_path / "tlt.toml").write_text('mtp = "updates"\n')
    with served(mtp.MIMO, tmp_path, "--tlt-config", str(tmp_path / "tlt.toml")) as mimo:
        mimo.trainer.disk(mimo.second).raise_for_status()
        assert answered(mimo.url) == expected(mimo.second)
        assert mimo.accept_length() < 1.5
        mimo.trainer.drafter(mimo.second, version=1).raise_for_status()
        mimo.assert_follows(mimo.second)
        assert mimo.trainer.disk(mimo.first, selector="draft").status_code == 400


def test_a_target_without_a_head_that_drafts_is_refused_in_words(tmp_path: Path) -> None:
    target = mtp.target(mtp.MIMO, tmp_path / "target", 0)
    require_head(str(target))
    path = target / "config.json"
    config = json.loads(path.read_text())
    for changed, why in (
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2, where one"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "tested of MiMoForCausalLM and Glm4MoeForCausalLM alone"),
    ):
        path.write_text(json.dumps(config | changed))
        with pytest.raises(ConfigError, match=why):
            require_head(str(target))
    path.write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "mtp_layers" not in name}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="left the head out"):
        require_head(str(target))
