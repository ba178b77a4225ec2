"""The embedded models in larger shapes: they say what the small ones say, at the sizes of the real large ones."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.models import shapes
from benchmarks.models.padding import Padding
from benchmarks.models.shapes import SHAPES, Built, Shape, build
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import problems
from tlt_server.demo.training import model
from tlt_server.demo.training.corpus import Batch, Sequence, collate, worked_solutions
from tlt_server.demo.training.model import Target
from tlt_server.demo.training.sampling import with_states
from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.chains import Frozen, draft
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import join
from tlt_server.trainer.publish.folder import load_drafter

TINY = {
    "same heads": Shape(bias=False, vocab=512, hidden=320, layers=6, heads=8, kv_heads=2, mlp=800, context=2_048),
    "wider heads, biases": Shape(
        bias=True, vocab=300, hidden=384, layers=5, heads=12, kv_heads=3, head_dim=128, mlp=1_024, context=2_048
    ),
}
# Of logits between -20 and 40, in float32. Another order of summation alone moves the small model's by 4e-5.
TOLERANCE = 3e-4


@pytest.fixture(scope="module", params=TINY)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shape, Built]:
    shape = TINY[request.param]
    return shape, build(shape, tmp_path_factory.mktemp("shapes") / request.param, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def small() -> Target:
    return load_target(default_paths()[0])


@pytest.fixture(scope="module")
def solutions() -> list[Sequence]:
    """Three solved problems of 200 tokens or more."""
    tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))
    return [each for each in worked_solutions(100, 5, tokenizer, 1) if 200 <= len(each.tokens) < 256][:3]


@pytest.fixture(scope="module")
def texts(solutions: list[Sequence]) -> Batch:
    return collate(solutions, torch.device("cpu"))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All but the biases, which the embedded models' modules do not have, and which are zero."""
    weights = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    biases = [name for name in weights if name.endswith("proj.bias")]
    assert not any(weights.pop(name).any() for name in biases)
    return weights


def sizes(folder: Path, shape: Shape) -> model.Shape:
    return replace(shape, eps=json.loads((folder / "config.json").read_text())["rms_norm_eps"])


@pytest.mark.slow
@torch.no_grad()
def test_it_answers_as_the_embedded_target_does(made: tuple[Shape, Built]) -> None:
    ours, theirs = (Reference(path) for path in (made[1].target, default_paths()[0]))
    for problem in [each for each in problems(40, 3) if min(each.left, each.right) >= 100][:3]:
        assert ours.tokens(problem.prompt) == theirs.tokens(problem.prompt)
        prompt = torch.tensor([ours.tokens(problem.prompt)])
        said = [each.model.generate(prompt, do_sample=False, max_new_tokens=80).tolist() for each in (ours, theirs)]
        assert said[0] == said[1]
        assert len(said[0][0]) > 64


@pytest.mark.slow
@torch.no_grad()
def test_its_logits_are_the_embedded_targets(made: tuple[Shape, Built], small: Target, texts: Batch) -> None:
    logits = Reference(made[1].target).model(texts.tokens).logits[texts.tokens != 0]
    hidden, _ = small(texts.tokens, small.shape.rope(torch.arange(texts.tokens.shape[1])))
    wanted = small.lm_head(hidden)[texts.tokens != 0]
    torch.testing.assert_close(logits[:, : small.shape.vocab], wanted, atol=TOLERANCE, rtol=0)
    assert logits[:, small.shape.vocab :].max() < -50


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["drafter", "drafter_eagle3"])
def test_its_drafters_draft_as_the_embedded_ones_do(
    made: tuple[Shape, Built], small: Target, solutions: list[Sequence], kind: str
) -> None:
    shape, built = made
    target, drafter = Target(sizes(built.target, shape)), load_drafter(getattr(built, kind)).network
    target.load_state_dict(weights_of(built.target))
    embedded = load_drafter(default_paths()[1] if kind == "drafter" else eagle3_path()).network
    chains = zip(drafts(target, drafter, solutions), drafts(small, embedded, solutions), strict=True)
    for logits, wanted in chains:
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        torch.testing.assert_close(logits[:, : small.shape.vocab], wanted, atol=TOLERANCE, rtol=0)
        assert logits[:, small.shape.vocab :].max() < -50


def drafts(target: Target, drafter: Network, solutions: list[Sequence]) -> Iterator[Tensor]:
    """Logits of chains of three drafts, from every token that one can begin at."""
    packed = join(with_states(target, drafter.aux_layers, solutions))
    for step in draft(drafter, Frozen(target.model.embed_tokens.weight, target.lm_head.weight), packed, 3):
        yield target.lm_head(step.reads[step.counts])


@st.composite
def pairs_of_shapes(draw: st.DrawFn) -> tuple[model.Shape, model.Shape]:
    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    keys, group, head_dim = size(1, 2), size(1, 3), draw(st.sampled_from((4, 8)))
    few = model.Shape(
        vocab=size(2, 9), hidden=size(8, 24), layers=size(1, 3), heads=keys * group, kv_heads=keys, head_dim=head_dim
    )
    few = replace(few, mlp=size(1, 20))
    keys, group = keys + size(0, 2), group + size(0, 2)
    many = model.Shape(
        vocab=few.vocab + size(0, 5), hidden=few.hidden + size(4, 40), layers=few.layers + size(0, 4),
        heads=keys * group, kv_heads=keys, head_dim=head_dim * size(1, 3), mlp=few.mlp + size(0, 30),
    )  # fmt: skip
    return few, many


@pytest.mark.slow
@torch.no_grad()
@settings(deadline=None, max_examples=60)
@given(pairs_of_shapes(), st.integers(0, 1 << 30))
def test_any_model_fits_into_any_larger_one(pair: tuple[model.Shape, model.Shape], seed: int) -> None:
    torch.manual_seed(seed)
    few = Target(pair[0])
    for weight in few.parameters():
        weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    padding = Padding(*pair, torch.float32, "cpu", seed)
    many = Target(padding.large)
    many.load_state_dict(dict(padding.target(few.state_dict())))
    tokens = torch.randint(pair[0].vocab, (2, 12))
    logits, wanted = (
        each.lm_head(each(tokens, each.shape.rope(torch.arange(12)))[0])[..., : pair[0].vocab] for each in (many, few)
    )
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # the real models' counts, a bias in each layer of Qwen2's, and in the 1.5B a head that is not the embedding
        ("qwen2.5-1.5b", 1_543_714_304 + 28 * 1_536 + 151_936 * 1_536),
        ("qwen2.5-7b", 7_615_616_512 + 28 * 3_584),
        ("qwen2.5-32b", 32_763_876_352 + 64 * 5_120),
        ("llama-3-8b", 8_030_261_248),
        ("50m", 48_249_344 + 8 * 512),
    ],
)
def test_it_has_as_many_parameters_as_the_real_one(name: str, parameters: int, small: Target) -> None:
    padding = Padding(small.shape, SHAPES[name], torch.bfloat16, "meta", 0)
    weights = dict(shapes._weights(default_paths()[0], SHAPES[name], padding))
    assert sum(weight.numel() for weight in weights.values()) == parameters


def test_what_reads_the_hidden_state_is_random(made: tuple[Shape, Built]) -> None:
    readers = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    for name, weight in weights_of(made[1].target).items():
        if name.endswith(readers):
            assert weight.std() > 0.01, name


def test_a_second_call_finds_the_first_ones_models(tmp_path: Path) -> None:
    first = build(TINY["same heads"], tmp_path / "m", device="cpu")
    written = first.target / "config.json"
    before = written.stat().st_mtime_ns
    assert build(TINY["same heads"], tmp_path / "m", device="cpu") == first
    assert written.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="exists and is not this model"):
        build(TINY["same heads"], tmp_path / "m", device="cpu", seed=1)


@pytest.mark.slow
def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    folders = [build(TINY["same heads"], tmp_path / str(i), device="cpu", seed=i // 2).target for i in range(3)]
    files = [(folder / "model-00001.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1] != files[2]


@pytest.mark.slow
def test_shards_hold_every_weight_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(TINY["wider heads, biases"], tmp_path / "whole", device="cpu").target
    monkeypatch.setattr(shapes, "SHARD_BYTES", 4 << 20)
    parts = build(TINY["wider heads, biases"], tmp_path / "parts", device="cpu").target
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < (4 << 20) + 10_000
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(set(load_file(file)) == {name for name, at in index.items() if at == file.name} for file in files)
    ours, theirs = weights_of(parts), weights_of(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shapes, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        build(TINY["same heads"], tmp_path / "m", device="cpu")
    assert not list(tmp_path.iterdir())


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        shapes.main(["gpt-5", str(tmp_path / "m")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "shape gpt-5: not known. Choose one of 50m, 18m, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b, llama-3-8b\n"
    )
    with pytest.raises(ConfigError, match="no room for the embedded target's 2 query heads to a key head; 768 units"):
        build(replace(TINY["same heads"], heads=2, mlp=700), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"bytes needed, .* free"):
        build(replace(TINY["same heads"], vocab=10**14), tmp_path / "m")
    assert not list(tmp_path.iterdir())
