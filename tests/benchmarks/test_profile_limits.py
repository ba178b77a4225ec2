"""The physical limit: what is counted, against what is known of the models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.profiling.limits import Load, Shape, Work, matmul, step_work
from tlt_server.config import Arm
from tlt_server.errors import ConfigError

CONFIG = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
TARGET = Shape.of(CONFIG)
DRAFTER = Shape.of(CONFIG | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}, TARGET)
EAGLE3 = Shape.of(
    CONFIG | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, TARGET
)
TREE = Arm(5, 4, 16)


def total(shape: Shape, drafter: Shape | None, load: Load) -> Work:
    parts = [part for parts in step_work(shape, drafter, load).values() for part in parts]
    return Work(sum(part.bytes for part in parts), sum(part.operations for part in parts))


def test_one_token_reads_every_weight_once() -> None:
    """Qwen2.5-7B has 7.62e9 parameters, 0.545e9 of them in the embedding, of which one row is read."""
    work = total(TARGET, None, Load(None, batch=1, context=0))
    assert work.bytes == pytest.approx(2 * (7.616e9 - 0.545e9), rel=0.003)
    assert work.operations == pytest.approx(work.bytes, rel=0.003)  # two for each weight, of two bytes


def test_the_cache_is_read_once_a_request() -> None:
    short, long = (total(TARGET, None, Load(None, batch=8, context=context)).bytes for context in (0, 1000))
    assert long - short == 8 * 1000 * 28 * 2 * 4 * 128 * 2


def test_an_arm_costs_its_passes() -> None:
    work = step_work(TARGET, DRAFTER, Load(TREE, batch=2, context=100, accept_length=3))
    assert work["verify", "head"] == [matmul(2 * 16, 3584, 152064)]
    assert work["draft", "head"] == 4 * [matmul(2 * 4, 3584, 152064)]
    assert work["draft", "input"] == 4 * [matmul(2 * 4, 2 * 3584, 3584)]
    assert work["extend", "mlp"][0] == matmul(2 * 3, 3584, 2 * 18944)
    assert work["extend", "head"] == [matmul(2, 3584, 152064)]
    assert len(work["verify", "mlp"]) == 2 * 28


def test_one_step_deep_nothing_is_drafted_by_passes() -> None:
    work = step_work(TARGET, DRAFTER, Load(Arm(1, 1, 2), batch=1, context=100))
    assert not [parts for (phase, _), parts in work.items() if phase == "draft" and parts]


def test_an_eagle3_drafter_joins_three_layers_of_the_target_once() -> None:
    work = step_work(TARGET, EAGLE3, Load(TREE, batch=1, context=100, accept_length=2))
    assert work["extend", "input"] == [matmul(2, 3 * 3584, 3584)]
    assert not work["draft", "input"]
    assert work["draft", "projections"][0] == matmul(4, 2 * 3584, 3584 + 2 * 4 * 128)
    assert work["draft", "head"][0] == matmul(4, 3584, 32000)


@given(st.integers(1, 256), st.integers(1, 256), st.floats(0, 1e5))
def test_more_requests_never_cost_less(batch: int, more: int, context: float) -> None:
    one, other = (total(TARGET, DRAFTER, Load(TREE, size, context, 2.5)) for size in (batch, batch + more))
    assert other.bytes > one.bytes
    assert other.operations > one.operations


def test_the_limit_is_the_slower_of_memory_and_arithmetic() -> None:
    assert Work(4.3e9, 1).limit_ms(4.3, 790) == pytest.approx(1)
    assert Work(1, 790e9).limit_ms(4.3, 790) == pytest.approx(1)
    assert matmul(1, 4096, 4096).limit_ms(4.3, 790) == pytest.approx(2 * 4096 * 4098 / 4.3e9)
    assert matmul(65536, 4096, 4096).limit_ms(4.3, 790) == pytest.approx(2 * 65536 * 4096 * 4096 / 790e9)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="intermediate_size"):
        Shape.of({name: value for name, value in CONFIG.items() if name != "intermediate_size"})
    with pytest.raises(ConfigError, match="drafter"):
        step_work(TARGET, None, Load(TREE, batch=1, context=1))
