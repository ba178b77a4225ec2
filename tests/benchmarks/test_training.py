"""The benchmark of the drafter trainer: its batches hold the same, its operations are counted right, it runs."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.commands.learning import trainer as bench_trainer
from benchmarks.lib.command import SEED
from benchmarks.lib.training import lengths, shown
from benchmarks.lib.training.batches import WAYS
from benchmarks.lib.training.jobs import Job, config_of
from benchmarks.lib.training.lengths import Length
from benchmarks.lib.training.work import operations, peak_tflops
from tests.benchmarks.test_tables import rows
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.packing import join

CPU = torch.device("cpu")
LENGTHS = [Length(5, 30), Length(4, 9), Length(9, 50), Length(3, 31), Length(6, 60)]
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8}


def job(budget: int = 256) -> Job:
    return Job(config_of("embedded") | SIZES, budget, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=20), budget=st.integers(8, 64))
def test_batches_hold_every_entry_once_within_the_budget(way: str, sizes: list[int], budget: int) -> None:
    runs = job().runs([Length(1, size) for size in sizes])
    batches = WAYS[way](runs, budget, CPU)
    assert all(len(batch.tokens) <= budget for batch in batches)
    held = torch.cat([torch.cat((batch.states, batch.finals), 1) for batch in batches])
    wanted = torch.cat([torch.cat((run.states[:-1], run.finals[1:]), 1) for run in runs])
    assert ((held[:, None] == wanted).all(-1).sum(0) == 1).all()
    counted = sum(int(batch.counted.sum()) for batch in batches)
    if way in ("packed", "masked"):
        assert counted == sum(run.entries for run in runs)
    else:
        assert counted == sum(len(batch.tokens) for batch in batches)


def test_what_may_be_learnt_from_is_learnt_alike() -> None:
    """The loss and the gradient of the same runs, packed and padded."""
    here, runs = job(), job().runs(LENGTHS)
    metrics = [here.trainer().step(WAYS[way](runs, 256, CPU)) for way in ("packed", "masked")]
    assert len(WAYS["packed"](runs, 256, CPU)) == 1 < len(WAYS["masked"](runs, 256, CPU))
    packed, masked = metrics
    assert packed.chains == masked.chains
    assert (masked.loss, masked.gradient_norm) == pytest.approx((packed.loss, packed.gradient_norm), rel=1e-4)


def test_operations_are_those_of_the_forward_pass_and_twice_as_many_for_the_backward_pass() -> None:
    here = job()
    trainer, (run,) = here.trainer(), here.runs([Length(1, 33)])
    pack = join([run])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All pairs, of which a causal mask would hide 31 / 64."""
        shared = [each.repeat_interleave(2, 0) for each in (key, value)]
        return (query @ shared[0].transpose(1, 2)).softmax(-1) @ shared[1]

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        embeds = trainer.frozen.embedding[pack.tokens]
        trainer.network.step(embeds, pack.states, trainer.network.rope(pack.positions), attend)
    query = 4 * SIZES["head_dim"]
    hidden_pairs = 4 * query * (32 * 32 - 32 * 33 / 2)
    head = 6 * 32 * trainer.frozen.head.numel()
    assert operations(trainer, [pack]) == 3 * (counter.get_total_flops() - hidden_pairs) + head
    assert operations(trainer, [join([run], fill=100)]) == operations(trainer, [pack])


def test_a_peak_that_is_not_known_is_measured() -> None:
    assert 0 < peak_tflops(CPU) < 100


def test_the_drafter_of_a_shape_is_of_its_sizes() -> None:
    config = config_of("qwen2.5-7b")
    assert config["architectures"] == ["Qwen2ForCausalLMEagle"]
    assert (config["hidden_size"], config["vocab_size"], config["num_key_value_heads"]) == (3584, 152064, 4)
    with pytest.raises(ConfigError, match="--shape 7b: not known"):
        config_of("7b")


def test_kept_lengths_are_of_the_task_and_have_its_long_tail() -> None:
    kept = lengths.kept()
    tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))
    prompts = [len(tokenizer.encode(problem.prompt).ids) for problem in problems(lengths.PROBLEMS, SEED)]
    assert [length.prompt for length in kept] == [prompt for prompt in prompts for _ in range(lengths.GROUP)]
    ordered = sorted(length.total - length.prompt for length in kept)
    assert ordered[len(ordered) * 9 // 10] > 2 * ordered[len(ordered) // 2]


@pytest.mark.slow
def test_what_is_measured_is_shown() -> None:
    figures = bench_trainer.measured(job(), bench_trainer.Size(rollouts=8, rounds=2, times=2))
    assert figures["rollouts"] == 8
    assert figures["batches_packed"] <= figures["batches_sorted"] <= figures["batches_padded"]
    assert figures["filled_packed"] == 1
    assert figures["checkpoint_full_mb"] > figures["checkpoint_mb"] > 0
    assert figures["yields"] == 2
    assert 0 < figures["yield_s_p50"] <= figures["yield_s_max"]
    table = rows(shown.trainer(results.measured_here("trainer", [], figures)))
    bars = {row[0]: row for row in table}
    assert bars["rollouts/s, padded and packed"][3] == f"{figures['packing_speedup']:.2f}"
    assert bars["packed"][-1] == "1.00"


def test_the_command_keeps_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_trainer.main(["--shape", "7b", "--json", str(tmp_path / "x.json")])
    assert ended.value.code == ConfigError.exit_code
    assert "--shape 7b: not known" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
