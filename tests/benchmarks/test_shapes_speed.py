"""Steps in the shapes of other models: what is served in their place, and what is kept where one of them fails."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.commands.speed import shapes
from benchmarks.commands.speed.shapes import PLANS, main, table
from benchmarks.lib.shapes import equality
from benchmarks.lib.shapes.equality import compare
from benchmarks.models import blocks, hollow
from benchmarks.models.shapes import SHAPES
from tests.definitions import undefined
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.results import Figures

TARGET = default_paths()[0]


@pytest.mark.slow
def test_the_command_measures_and_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mixture of made-up weights; and one of real ones, whose answers are compared across the updates."""
    main(["--smoke", "--shapes", "moe", "fp8", "--json", str(tmp_path / "x.json")])
    figures = results.read(tmp_path / "x.json").figures
    assert not undefined(figures)
    for shape in ("moe", "fp8"):
        assert figures[f"accept_length_{shape}_chain_3_batch_2"] == shapes.ACCEPTED
        assert figures[f"windows_{shape}_plain_batch_1"] > 3
        assert figures[f"swap_s_{shape}"] > 0
        assert figures[f"publication_s_{shape}"] > 0
        assert figures[f"failed_requests_{shape}"] == 0
    assert (figures["greedy_responses_fp8"], figures["greedy_divergences_fp8"]) == (2, 0)
    shown = capsys.readouterr().out
    assert "moe, accept length 3" in shown
    assert "greedy non ties: 0" in shown


def test_where_one_fails_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """Of that one what was measured before, too."""

    def one(shape: str, _models: Any, _folder: Path, logs: Path, _arguments: Any) -> Iterator[Figures]:
        for rounds in (1, 2):
            yield {f"step_ms_{shape}_plain_batch_1": float(rounds), "requests": 3 * rounds, "failed_requests": 0}
            if shape == "32b":
                (logs / "arms.log").write_text("out of memory\n")
                raise RuntimeError("it ended")

    monkeypatch.setattr(shapes, "one", one)
    with pytest.raises(SystemExit) as ended:
        main(["--shapes", "32b", "moe", "fp8", "--json", str(tmp_path / "x.json"), "--logs", str(tmp_path / "logs")])
    assert ended.value.code
    assert capsys.readouterr().err == "shapes: 32b: not measured whole; what was is kept\n"
    assert "out of memory" in caplog.text
    figures = results.read(tmp_path / "x.json").figures
    assert figures["requests"] == 3 + 6 + 6
    assert (figures["step_ms_32b_plain_batch_1"], figures["step_ms_fp8_plain_batch_1"]) == (1, 2)


def test_parts_are_shown_together() -> None:
    figures = {"requests": 2, "failed_requests": 0, "swap_s_moe": 0.25}
    for shape in ("moe", "32b"):
        figures |= {f"tokens_per_s_{shape}_{side}_batch_8": 1.0 for side in ("plain", "chain_3")}
        figures |= {f"step_ms_{shape}_plain_batch_8": 2.0, f"step_ms_{shape}_chain_3_batch_8": 3.0}
        figures |= {f"speedup_{shape}_chain_3_batch_8": 2.0}
    shown = table(results.measured_here("shapes", [], figures))
    assert shown.index("32b, accept length 3") < shown.index("moe, accept length 3")
    assert "| chain 3,1,4, speed-up | 2.00 |" in shown
    assert "swap s: 0.25" in shown
    assert not undefined(figures)


@pytest.mark.parametrize("plan", [plan for plan in PLANS.values() if plan.of and not plan.quantized])
def test_a_dense_shape_is_the_published_ones(plan: shapes.Plan) -> None:
    config = hollow.dense(str(plan.of), tiny=False)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (
        SHAPES[str(plan.of)].hidden,
        SHAPES[str(plan.of)].layers,
    )


def test_a_hollow_mixture_has_a_drafter_and_a_part(tmp_path: Path) -> None:
    config = hollow.mixture(tiny=True)
    target, drafter = hollow.write(config, tmp_path, TARGET)
    assert not list(target.glob("*.safetensors"))
    assert (drafter / "model.safetensors").is_file()
    part = hollow.part_of(config)
    assert part["model.layers.0.mlp.gate.weight"].shape == (8, 128)
    assert part["model.layers.0.mlp.experts.7.down_proj.weight"].shape == (128, 64)


def test_weights_in_blocks_are_the_weights() -> None:
    """To half a step of e4m3, which keeps four bits; blocks of nothing but zeros stay that."""
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0
    names = dict(
        blocks.in_blocks([("a.q_proj.weight", weight), ("a.q_proj.bias", weight[0]), ("norm.weight", weight[1])])
    )
    assert list(names) == ["a.q_proj.weight", "a.q_proj.weight_scale_inv", "a.q_proj.bias", "norm.weight"]
    quantized, scale = names["a.q_proj.weight"], names["a.q_proj.weight_scale_inv"]
    assert (quantized.dtype, scale.shape) == (torch.float8_e4m3fn, (2, 3))
    again = quantized.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert not again[:128, :128].any()
    torch.testing.assert_close(again, weight, rtol=2**-4, atol=1e-2)


class Undecided:
    """Answers by strategy; where two part, its logprobs are told."""

    def __init__(self, said: Mapping[str, Tokens], logprobs: Mapping[int, float]) -> None:
        self.said, self.logprobs, self.mode = said, logprobs, ""

    def ask(self, requests: Any, at_once: int, **fields: Any) -> list[dict[str, Any]]:
        del at_once
        if "top_logprobs_num" in fields:
            told = [[value, token, None] for token, value in self.logprobs.items()]
            return [{"meta_info": {"output_top_logprobs": [told]}}]
        return [{"output_ids": self.said[self.mode]} for _ in requests]


@pytest.mark.parametrize(
    ("logprobs", "ties"), [({5: -0.7, 6: -0.9}, True), ({5: -0.1, 6: -3.0}, False), ({5: 0.0}, False)]
)
def test_answers_part_by_ties_alone(logprobs: Mapping[int, float], ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Undecided({"off": (1, 5, 2), "pinned": (1, 6, 3)}, logprobs)
    monkeypatch.setattr(equality, "strategy", lambda server, mode: setattr(server, "mode", mode))
    figures = compare(server, [(9,)], dict)  # type: ignore[arg-type]
    assert (figures["greedy_divergences"], figures["greedy_non_ties"]) == (1, int(not ties))
    assert figures["greedy_divergences_control"] == 0
