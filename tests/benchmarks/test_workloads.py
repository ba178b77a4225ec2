"""What benchmarks serve and ask: models that are no easier to draft for than the demo's, and as long as is said."""

import json
from pathlib import Path
from statistics import median

import pytest
from tokenizers import Tokenizer

from benchmarks.commands.speed import accept_length, context
from benchmarks.commands.speed.strategy import natural_load
from benchmarks.lib.accepting import CASES
from benchmarks.lib.command import Models
from benchmarks.lib.training.lengths import GROUP, PROBLEMS, kept
from benchmarks.models.workloads import MODELS, WORKLOADS, Workload
from tests.definitions import undefined
from tlt_server.demo.task import problems
from tlt_server.demo.tokens import END_ID
from tlt_server.results import read

DEMO, LONG = WORKLOADS["demo"], WORKLOADS["long"]
LONG_FIGURES = read(LONG.models / "figures.json").figures


def models_of(workload: Workload) -> Models:
    return Models(workload.models / "target", workload.models / "drafter", workload)


def shape(folder: Path) -> dict[str, object]:
    """A config but for positions; a bias that it does not name is none."""
    config = {"attention_bias": False, "mlp_bias": False, **json.loads((folder / "config.json").read_text())}
    return {name: value for name, value in config.items() if name not in ("max_position_embeddings", "rope_theta")}


def test_the_long_models_are_small_and_no_easier_to_draft_for() -> None:
    assert sum(path.stat().st_size for path in LONG.models.rglob("*") if path.is_file()) <= 15_000_000
    assert [shape(LONG.models / name) for name in MODELS] == [shape(DEMO.models / name) for name in MODELS]
    assert LONG_FIGURES["entropy_nats"] >= 0.12
    for drafter in MODELS[1:]:
        assert LONG_FIGURES[f"accept_length_{drafter}"] == pytest.approx(3.55, abs=0.05)  # the demo's
        short, long = (LONG_FIGURES[f"accept_length_{drafter}_at_{n}"] for n in (1024, 16_384))
        assert long == pytest.approx(short, rel=0.03)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_kept_lengths_are_of_its_prompts_and_have_a_tail(workload: Workload) -> None:
    lengths = kept(workload)
    prompts = models_of(workload).prompts(PROBLEMS)
    assert [len(prompt) for prompt in prompts] == [length.prompt for length in lengths[::GROUP]]
    responses = [length.total - length.prompt for length in lengths]
    assert max(responses) > 5 * median(responses)
    assert max(length.total for length in lengths) <= workload.longest
    assert max(responses) > (4000 if workload is LONG else 500)


def test_contexts_are_filled_with_solved_problems() -> None:
    models = models_of(LONG)
    tokenizer = Tokenizer.from_file(str(models.target / "tokenizer.json"))
    [tokens] = models.prompts(1, 4096)
    *solved, asked = "".join(
        "\n\n" if token == END_ID else tokenizer.decode([token], skip_special_tokens=False) for token in tokens
    ).split("\n\n")
    assert asked.endswith(problems(1, 2026, LONG.task)[0].prompt)
    assert len(solved) > 2
    assert all("answer" in each for each in solved)
    assert models.prompts(1, 4096) == [tokens]


def test_a_closed_loop_asks_the_same_of_every_side() -> None:
    load = natural_load(models_of(LONG), 8, smoke=True)
    assert load.batch == 8
    assert len(set(load.prompts)) > 100
    asked = {"temperature": 1.0, "max_new_tokens": LONG.longest, "ignore_eos": False}
    assert all(params == {**asked, "sampling_seed": seed} for seed, (_, params) in enumerate(load.requests()))
    assert (load.warm_up.batch, load.warm_up.closed, load.warm_up.tokens) == (8, None, 24)
    assert load.warm_up.requests()[0][1]["ignore_eos"]


def test_claims_are_named_and_defined() -> None:
    natural = {f"accept_length_{case.figure.format('chain_3')}": 3.5 for case in CASES}
    assert accept_length.summary(natural) == {"accept_length_at_1024": 3.5, "accept_length_at_16384": 3.5}
    name = f"accept_length_{CASES[0].figure.format('chain_3')}"
    computed = {
        f"{name}{of}{end}": 2.5
        for of in ("", "_stale", "_noised", "_eagle3")
        for end in ("_computed", "_computed_greedy")
    }
    served = {f"{name}{of}": value for of, value in (("", 2.5), ("_stale", 2.25), ("_noised", 3.0), ("_eagle3", 2.5))}
    claims = accept_length.summary(computed | served)
    assert accept_length.summary({**computed, **served, **claims}) == claims
    worst = ("accept_length_worst_ratio_to_computed", "sharpness_worst_ratio_to_greedy")
    assert {name: claims[name] for name in worst} == dict.fromkeys(worst, 0.9)
    long = {
        "speedup_bandit_context_32768_batch_8": 2.5,
        "speedup_chain_3_accept_3_context_8192_batch_1": 1.5,
        "speedup_chain_3_context_8192_batch_1": 1.75,
    }
    claimed = {"context_speedup_32768_8": 2.5, "context_ratio_chain_3_accept_3_8192_1": 1.5}
    assert context.summary(long) == claimed
    assert not undefined([*natural, *computed, *served, *claims, *accept_length.summary(natural), *long, *claimed])
