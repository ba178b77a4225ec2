"""A drafter's folder: what lies in it, made whole or not at all."""

import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.drafter.conftest import write_config
from tests.forks import FORKS
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.drafter.folder import cached, create
from tlt_server.drafter.layout import most_frequent, read_counts, vocabulary_of
from tlt_server.errors import ConfigError


@pytest.mark.parametrize("kind", DrafterKind)
def test_names_shapes_and_dtypes_are_the_embedded_drafters(kind: DrafterKind, tmp_path: Path) -> None:
    target, drafter = default_paths()
    create(str(target), tmp_path / "made", kind)
    wanted = load_file((drafter if kind is DrafterKind.EAGLE else eagle3_path()) / "model.safetensors")
    found = load_file(tmp_path / "made/model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}


def test_the_seed_decides(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target")
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        create(str(target), tmp_path / name, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors")["fc.weight"] for name in "abc")
    assert a.equal(b)
    assert not a.equal(c)
    with safe_open(tmp_path / "c/model.safetensors", "pt") as file:
        assert file.metadata().items() >= {"trained": "no", "target": str(target), "seed": "2"}.items()


@pytest.mark.parametrize("kind", DrafterKind)
def test_how_it_begins(kind: DrafterKind, targets: Mapping[str, Path], tmp_path: Path) -> None:
    create(str(targets["qwen2"]), tmp_path / "out", kind)
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        values = tensor.float()
        if name.endswith("norm.weight"):
            assert bool((values == 1).all())
        elif name.endswith("bias"):
            assert bool((values == 0).all())
        else:
            if name == "fc.weight" and kind is DrafterKind.EAGLE:
                values[:, values.shape[0] :] -= torch.eye(len(values))
            assert abs(float(values.mean())) < 1e-3
            assert 0.018 < float(values.std()) < 0.022


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    target, out = write_config(tmp_path / "target"), tmp_path / "folders/out"
    create(str(target), out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        create(str(target), out, seed=1)
    with pytest.raises(ConfigError, match="hold no lm_head"):
        create(str(target), tmp_path / "folders/other", DrafterKind.EAGLE3, _vocabulary(tmp_path, {}))
    with pytest.raises(ConfigError, match="File exists"):
        create(str(target), target / "config.json" / "out")
    assert (out / "model.safetensors").read_bytes() == before
    assert [each.name for each in out.parent.iterdir()] == ["out"]


def test_no_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder, and not a name on the hub"):
        create(str(tmp_path / "none"), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        create(str(tmp_path), tmp_path / "out")


def test_the_cache_holds_one_for_each_shape_and_kind(tmp_path: Path) -> None:
    targets = [write_config(tmp_path / "a"), write_config(tmp_path / "b", hidden_size=128)]
    folders = [cached(str(target), kind, tmp_path / "cache") for target, kind in product(targets, DrafterKind)]
    assert len(set(folders)) == 4
    times = [(folder / "model.safetensors").stat().st_mtime_ns for folder in folders]
    same = write_config(tmp_path / "c", eos_token_id=7)
    assert cached(str(same), DrafterKind.EAGLE, tmp_path / "cache") == folders[0]
    assert times == [(folder / "model.safetensors").stat().st_mtime_ns for folder in folders]


@pytest.mark.slow
def test_two_servers_that_start_at_once(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", intermediate_size=40_000)
    with ProcessPoolExecutor(2, mp_context=FORKS) as pool:
        calls = [pool.submit(cached, str(target), DrafterKind.EAGLE, tmp_path / "cache") for _ in range(2)]
    first, second = (call.result() for call in calls)
    assert first == second
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [first.name]
    assert len(load_file(first / "model.safetensors")) == 10


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.data())
def test_the_vocabulary_is_of_the_most_frequent(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts) - 1))
    tokens = most_frequent(torch.tensor(counts), size)
    assert tokens.tolist() == sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])
    maps = vocabulary_of(tokens, len(counts))
    assert (maps["d2t"] + torch.arange(size)).tolist() == tokens.tolist()
    assert maps["t2d"].nonzero().flatten().tolist() == tokens.tolist()


def test_a_head_of_its_own_starts_as_the_targets(targets: Mapping[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    create(str(targets["llama"]), out, DrafterKind.EAGLE3, _vocabulary(tmp_path, {"40": 9, "2": 5, "3": 5}))
    head = load_file(targets["llama"] / "model.safetensors")["lm_head.weight"]
    assert load_file(out / "model.safetensors")["lm_head.weight"].equal(head[[2, 40]])
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "Expected `object`"),
        ('{"a": 1}', "Expected `int`"),
        ("{", 'Write {"token id": count}'),
        ('{"96": 1}', "token 96 is not one of the target's, 0 to 95"),
        ('{"-1": 1}', "token -1 is not"),
    ],
)
def test_counts_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_counts(tmp_path / "counts.json", 96)
    with pytest.raises(ConfigError, match="No such file"):
        read_counts(tmp_path / "none.json", 96)


def _vocabulary(folder: Path, counts: dict[str, Any]) -> tuple[int, Path]:
    path = folder / "counts.json"
    path.write_text(json.dumps(counts))
    return 2, path
