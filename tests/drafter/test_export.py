"""Exports: the drafter that was read, whole, in each form; or why a form has no place for it. And the model card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.models.formats import EAGLE, EAGLE3, FORMATS, HEAD, KNOWN, REFUSED, TARGET
from tests.drafter.conftest import write_config
from tests.drafter.test_published import changed
from tlt_server import results
from tlt_server.config import DrafterForm, DrafterKind
from tlt_server.drafter.card import HEARD, Lengths, card, from_bench
from tlt_server.drafter.export import Exported, export, told
from tlt_server.drafter.folder import create
from tlt_server.drafter.published import AUX_LAYERS, Published, read
from tlt_server.errors import ConfigError
from tlt_server.trainer.commands import app

SERVED = [name for name in FORMATS if name not in REFUSED]
PROVENANCE = {"trained": "yes", "target": "Qwen/Qwen2.5-7B-Instruct", "trained_on": "7", "steps": "3", "tokens": "900"}
SPECULATORS_REFUSES = {"EAGLE-3, narrower": "target_hidden_size"}
"""Of the EAGLE-3 forms."""


def written(folder: Path, form: DrafterForm, out: Path) -> tuple[Published, Published]:
    """A drafter, and what is read of its export."""
    found = read(folder)
    export(Exported.of(found), form, out, str(TARGET))
    return found, read(out)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def assert_same(before: Published, after: Published) -> None:
    """Tensor for tensor; a head that the target gave is the target's."""
    ours, theirs = before.tensors(), after.tensors()
    assert {name for name, each in ours.items() if not torch.equal(each, theirs[name])} == set()
    added = theirs.keys() - ours.keys()
    assert added <= {"lm_head.weight", "d2t"}
    assert "lm_head.weight" not in added or torch.equal(theirs["lm_head.weight"], HEAD)
    assert "d2t" not in added or not theirs["d2t"].any()
    assert after.kind == before.kind
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "rope_theta", "rope_scaling", "rope_parameters"):
        assert after.config.get(key) == before.config.get(key)
    for option in ("fc_norm", "norm_output", "norm_before_fc"):
        assert bool(after.config.get(option)) == bool(before.config.get(option))
    layers = [(each.config.get("eagle_config") or {}).get(AUX_LAYERS) for each in (before, after)]
    assert layers[0] == layers[1]


def expected_refusal(name: str, form: DrafterForm, found: Published) -> str | None:
    if found.kind is DrafterKind.EAGLE:
        biased = bool(found.tensors()["fc.bias"].any())
        return {DrafterForm.VLLM: "fc.bias: vLLM" if biased else None, DrafterForm.SPECULATORS: "EAGLE-3's alone"}.get(
            form
        )
    return SPECULATORS_REFUSES.get(name) if form is DrafterForm.SPECULATORS else None


@pytest.mark.parametrize("form", DrafterForm)
@pytest.mark.parametrize("name", SERVED)
def test_an_export_is_the_drafter_that_was_read(name: str, form: DrafterForm, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / "published")
    if message := expected_refusal(name, form, read(tmp_path / "published")):
        with pytest.raises(ConfigError, match=message):
            written(tmp_path / "published", form, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    before, after = written(tmp_path / "published", form, tmp_path / "out")
    assert_same(before, after)
    if form is DrafterForm.SGLANG:
        assert not after.changed
    assert (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("source", [EAGLE, EAGLE3])
def test_what_is_exported_twice_is_the_same(source: Path, tmp_path: Path) -> None:
    written(source, DrafterForm.SGLANG, tmp_path / "one")
    written(tmp_path / "one", DrafterForm.SGLANG, tmp_path / "two")
    assert config_of(tmp_path / "one") == config_of(tmp_path / "two")
    assert told(tmp_path / "one") == told(tmp_path / "two")


def unbiased(folder: Path, architecture: str = "LlamaForCausalLMEagle", more: dict[str, Tensor] | None = None) -> Path:
    config, tensors = config_of(EAGLE), load_file(EAGLE / "model.safetensors") | (more or {})
    tensors["fc.bias"].zero_()
    drafter = Exported(config | {"architectures": [architecture]}, tensors, {})
    export(drafter, DrafterForm.SGLANG, folder)
    return folder


def test_vllms_eagle_has_llamas_name_and_no_bias_in_fc(tmp_path: Path) -> None:
    before, after = written(unbiased(tmp_path / "in"), DrafterForm.VLLM, tmp_path / "out")
    assert "fc.bias" not in load_file(tmp_path / "out" / "model.safetensors")
    assert config_of(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]
    assert_same(before, after)


def test_vllms_eagle_of_qwen2_is_a_llama_with_biases(tmp_path: Path) -> None:
    rows = {x: len(load_file(EAGLE / "model.safetensors")[f"layers.0.self_attn.{x}_proj.weight"]) for x in "qkv"}
    biases = {f"layers.0.self_attn.{x}_proj.bias": torch.ones(n) for x, n in rows.items()}
    source = unbiased(tmp_path / "in", "Qwen2ForCausalLMEagle", biases)
    before, after = written(source, DrafterForm.VLLM, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert (config["model_type"], config["qkv_bias"], config["attention_bias"]) == ("llama", True, False)
    assert_same(before, after)
    assert after.config["architectures"] == ["Qwen2ForCausalLMEagle"]


def test_speculators_says_its_target_and_counts_layers_by_input(tmp_path: Path) -> None:
    FORMATS["SpecForge"](tmp_path / "in")
    written(tmp_path / "in", DrafterForm.SPECULATORS, tmp_path / "out")
    config, inner = config_of(tmp_path / "out"), config_of(EAGLE3)["eagle_config"][AUX_LAYERS]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(TARGET),
        "architectures": config_of(TARGET)["architectures"],
    }
    assert config[AUX_LAYERS] == [layer + 1 for layer in inner]
    assert config["draft_vocab_size"] == KNOWN
    assert config["norm_before_residual"] is False
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["t2d"].sum() == KNOWN
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero()[:, 0].equal(tensors["d2t"] + torch.arange(KNOWN))


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, len(HEAD) - 1), min_size=1, max_size=40))
def test_any_vocabulary_goes_through_speculators_form(
    tmp_path_factory: pytest.TempPathFactory, known: set[int]
) -> None:
    """Whoever reads it finds the same tokens."""
    base, rows = tmp_path_factory.mktemp("vocabulary"), torch.tensor(sorted(known))
    offsets = rows - torch.arange(len(rows))
    head: dict[str, Tensor | None] = {"lm_head.weight": HEAD[rows].clone(), "d2t": offsets}
    source = changed(base / "in", head, draft_vocab_size=len(rows))
    before, after = written(source, DrafterForm.SPECULATORS, base / "out")
    assert_same(before, after)
    assert after.tensors()["d2t"].equal(offsets)
    assert load_file(base / "out" / "model.safetensors")["t2d"].nonzero()[:, 0].equal(rows)


@pytest.mark.parametrize(
    ("form", "changes", "target", "message"),
    [
        (DrafterForm.VLLM, {"attention_bias": True}, None, "attention_bias"),
        (DrafterForm.VLLM, {"architectures": ["MistralForCausalLMEagle"]}, None, "exported for SGLang alone"),
        (DrafterForm.SPECULATORS, {}, None, "give --target"),
    ],
)
def test_what_a_form_has_no_place_for(
    form: DrafterForm, changes: dict[str, Any], target: str | None, message: str, tmp_path: Path
) -> None:
    drafter = Exported(config_of(EAGLE3) | changes, load_file(EAGLE3 / "model.safetensors"), {})
    with pytest.raises(ConfigError, match=message):
        export(drafter, form, tmp_path / "out", target)
    assert not list(tmp_path.iterdir())


def test_a_head_over_all_tokens_in_another_order_has_no_place(tmp_path: Path) -> None:
    offsets = torch.zeros(len(HEAD), dtype=torch.int64)
    offsets[0], offsets[1] = 1, -1
    source = changed(tmp_path / "in", {"lm_head.weight": HEAD.clone(), "d2t": offsets}, draft_vocab_size=len(HEAD))
    with pytest.raises(ConfigError, match="reorders them"):
        written(source, DrafterForm.SPECULATORS, tmp_path / "out")


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        written(EAGLE3, DrafterForm.SGLANG, tmp_path / "out")


def front_matter(text: str) -> tuple[Any, str]:
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_is_known() -> None:
    provenance = PROVENANCE | {"accepted": "0.8000 0.5000", "temperature": "1"}
    measured = [Lengths("3,1,4, 8 at once", "0.7", [0.9, 0.7, 0.6])]
    front, body = front_matter(card(config_of(EAGLE3), provenance, DrafterForm.SGLANG, PROVENANCE["target"], measured))
    assert front == {"base_model": PROVENANCE["target"], "tags": ["speculative-decoding", "eagle3"]}
    assert f"# EAGLE-3 drafter for {PROVENANCE['target']}" in body
    assert "| tokens learnt from | 900 |" in body
    assert f"| {HEARD} | 1 | 2.30 | 0.80 | 0.50 |  |" in body
    assert "| 3,1,4, 8 at once | 0.7 | 3.20 | 0.90 | 0.70 | 0.60 |" in body
    assert f"--model-path {PROVENANCE['target']} --drafter" in body


def test_a_card_of_nothing_known_says_so() -> None:
    front, body = front_matter(card(config_of(EAGLE), {"accepted": "by others"}, DrafterForm.VLLM, None))
    assert front == {"tags": ["speculative-decoding", "eagle"]}
    assert "Not known." in body
    assert "Not measured." in body
    assert "sglang" not in body


def test_a_folder_of_this_machine_is_named_by_its_last_part_alone(tmp_path: Path) -> None:
    front, body = front_matter(card(config_of(EAGLE), {}, DrafterForm.SGLANG, str(tmp_path / "my-target")))
    assert "base_model" not in front
    assert "# EAGLE drafter for my-target" in body
    assert str(tmp_path) not in body


def test_the_card_of_random_weights(tmp_path: Path) -> None:
    create(str(TARGET), tmp_path / "in")
    export(Exported.of(read(tmp_path / "in")), DrafterForm.SGLANG, tmp_path / "out")
    assert "None: its weights are random." in (tmp_path / "out" / "README.md").read_text()


def test_the_card_has_what_a_bench_found(tmp_path: Path) -> None:
    figures = {"temperature": 0.7, "accepted_2_3_1_4_batch_8": 0.5, "accepted_1_3_1_4_batch_8": 0.75, "speedup": 2.0}
    result = results.measured_here("bench", ["tlt-server", "bench"], figures)
    results.write(result, tmp_path / "bench.json")
    assert from_bench(tmp_path / "bench.json") == [Lengths("3,1,4, 8 at once", "0.7", [0.75, 0.5])]
    results.write(results.measured_here("bench", [], {"speedup": 1.0}), tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no accepted drafts"):
        from_bench(tmp_path / "none.json")


def test_the_command(tmp_path: Path) -> None:
    arguments = ["export", str(EAGLE3), "--out", str(tmp_path / "out"), "--form", "speculators", "--target"]
    done = CliRunner().invoke(app, [*arguments, str(TARGET)])
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out").kind is DrafterKind.EAGLE3
    of_another = [
        "export",
        str(EAGLE3),
        "--out",
        str(tmp_path / "other"),
        "--target",
        str(write_config(tmp_path / "t")),
    ]
    refused = CliRunner().invoke(app, of_another).exception
    assert isinstance(refused, ConfigError)
    assert "does not fit target" in str(refused)
    assert not (tmp_path / "other").exists()
