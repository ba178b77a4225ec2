"""Drafters in the forms in which they are published: read by SGLang's names, or refused in words."""

import json
import pickle
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.models.formats import EAGLE, EAGLE3, FORMATS, HEAD, NOT_TRAINED, REFUSED
from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import as_served
from tlt_server.drafter.published import read
from tlt_server.errors import ConfigError
from tlt_server.trainer.publish.folder import load_drafter

SERVED = [name for name in FORMATS if name not in REFUSED]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    folder = tmp_path / "published"
    FORMATS[request.param](folder)
    return request.param, folder


def test_each_form_is_read_or_refused_in_words(form: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = form
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            read(folder)
        return
    found = read(folder)
    of = EAGLE if found.kind is DrafterKind.EAGLE else EAGLE3
    ours, theirs = load_file(of / "model.safetensors"), found.tensors()
    if name != "EAGLE-3, narrower":
        assert {n: each for n, each in theirs.items() if n in ours}.keys() == ours.keys()
        assert all(torch.equal(theirs[n], each) for n, each in ours.items())
    served = as_served(str(folder), tmp_path / "cache")
    again = read(served)
    assert not again.changed, again.changed
    assert again.config == found.config
    assert as_served(str(folder), tmp_path / "cache") == served


def test_each_form_begins_training_or_says_why_not(form: tuple[str, Path]) -> None:
    name, folder = form
    if message := REFUSED.get(name) or NOT_TRAINED.get(name):
        with pytest.raises(ConfigError, match=message):
            load_drafter(folder)
        return
    drafter = load_drafter(folder)
    if (tokens := drafter.network.draft_tokens) is not None:
        assert tokens.tolist() == list(range(len(tokens)))


def test_the_embedded_ones_are_taken_as_they_lie(tmp_path: Path) -> None:
    for folder in (EAGLE, EAGLE3):
        assert as_served(str(folder), tmp_path) == folder
    assert not list(tmp_path.iterdir())


def test_a_head_beside_the_targets_is_left_out(tmp_path: Path) -> None:
    """draft_vocab_size null says whose head it is."""
    found = read(changed(tmp_path / "drafter", {"lm_head.weight": HEAD.clone(), "embed_tokens.weight": HEAD.clone()}))
    assert not found.changed
    assert found.tensors().keys() == load_file(EAGLE3 / "model.safetensors").keys()


def test_a_path_that_sglang_would_take_for_mistrals_format_is_another(tmp_path: Path) -> None:
    folder = changed(tmp_path / "EAGLE3-Mistral-7B")
    served = as_served(str(folder), tmp_path / "cache")
    assert served != folder
    assert "mistral" not in str(served.relative_to(tmp_path)).lower()
    assert read(served).tensors().keys() == read(folder).tensors().keys()


def changed(folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: object) -> Path:
    """The embedded EAGLE-3 drafter, otherwise: a tensor that is None is left out."""
    found = {**load_file(EAGLE3 / "model.safetensors"), **(tensors or {})}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((EAGLE3 / "config.json").read_text()) | config))
    save_file({name: each for name, each in found.items() if each is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"fc.weight": None}, {}, "no fc.weight"),
        ({"norm.weight": None}, {}, "norm.weight is missing"),
        (
            {"layers.0.self_attn.q_norm.weight": torch.ones(64)},
            {},
            r"q_norm.weight: SGLang 0.5.17's EAGLE-3 has no such",
        ),
        (
            {"lm_head.weight": HEAD[:255].clone()},
            {"draft_vocab_size": 255},
            "knows 255 of 295 tokens, and without d2t nobody knows which",
        ),
        (
            {"lm_head.weight": HEAD[:255].clone(), "d2t": torch.zeros(9)},
            {"draft_vocab_size": 255},
            r"d2t is \[9\], where the head has 255 rows",
        ),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "not 2 layers of 256"),
        ({}, {"vocab_size": None}, "no vocab_size"),
        ({}, {"speculators_model_type": "mlp", "transformer_layer_config": {}}, "speculators' mlp"),
        ({"layers.1.norm": torch.ones(1)}, {}, "layers.1.norm: SGLang 0.5.17's EAGLE-3 has no such weight"),
    ],
)
def test_what_would_guess_badly_is_refused_by_its_name(
    tensors: dict[str, torch.Tensor | None], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(changed(tmp_path / "drafter", tensors, **config))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps({"fc.weight": 1}, 2), b"\x80\x02" + b"]" * 99])
def test_a_bin_that_is_none_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_link_that_leads_nowhere_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(ConfigError, match="Download it whole"):
        read(tmp_path)


def test_what_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        file.truncate(9 << 30)  # of which none is on the disk
    with pytest.raises(ConfigError, match=r"9,663,676,416 bytes of weights"):
        read(tmp_path)


def test_a_pickle_that_would_run_something_does_not(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text("{}")
    for form in (True, False):
        torch.save({"fc.weight": _Touching(ran)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form)
        with pytest.raises(ConfigError, match="not a file of tensors"):
            read(tmp_path)
    assert not ran.exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
)
KEYS = (
    "architectures",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "vocab_size",
    "hidden_size",
    "target_hidden_size",
    "transformer_layer_config",
    "speculators_model_type",
    "tie_word_embeddings",
)
NAMES = ("fc.weight", "lm_head.weight", "d2t", "layers.9999999999.x", "layers.0.hidden_norm.weight", "norm.weight")


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=3), max_size=3),
)
@settings(max_examples=150)
def test_whatever_a_folder_says_it_is_read_or_refused(config: dict[str, object], shapes: dict[str, list[int]]) -> None:
    with TemporaryDirectory() as place:
        tensors: dict[str, torch.Tensor | None] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        folder = changed(Path(place) / "drafter", tensors, **config)
        with suppress(ConfigError):
            assert read(folder).described()


class _Touching:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)
