"""Packed passes and the head in parts against transformers' own forward pass, gradients too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tlt_server.demo import default_paths
from tlt_server.demo.task import sample_texts
from tlt_server.engine.cpu.torchvision import mend_torchvision

from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.batches import Pack, Trajectory, pack
from tlt_grpo.learning.passes import head_logprobs, pack_logprobs, packed_attention

mend_torchvision()
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

PACKED = packed_attention()
TARGET = str(default_paths()[0])
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}
"""float32 sums in another order, of log-probabilities of up to 20."""


@pytest.fixture(scope="module")
def some() -> list[Trajectory]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = []
    for number, text in enumerate(sample_texts(5, seed=1)):
        prompt, response = (tuple(tokenizer.encode(part)) for part in text.split("\n", 1))
        made.append(Trajectory(prompt, response[:80], (0.0,) * len(response[:80]), float(number)))
    return made


def model(attention: str, **settings: Any) -> Any:
    made = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation=attention)
    if settings.get("checkpointing"):
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.train()
    return made


def plain(model: Any, some: list[Trajectory], temperature: float) -> torch.Tensor:
    """One trajectory at a time, its whole logits at once."""
    found = []
    for each in some:
        tokens = torch.tensor([each.prompt + each.response])
        laws = (model(tokens).logits[0] / temperature).log_softmax(-1)
        found += [laws[place - 1, tokens[0, place]] for place in range(len(each.prompt), tokens.shape[1])]
    return torch.stack(found)


def test_attention_is_none_that_is_compiled_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response has another length, and a step many of them."""
    asked, attend = [], F.scaled_dot_product_attention

    def attended(*args: Any, **named: Any) -> torch.Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attended)
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    made, _ = ALL_ATTENTION_FUNCTIONS[PACKED](torch.nn.Identity(), query, key, key, None, lengths=(2, 3), scaling=0.5)
    assert (made.shape, asked) == ((1, 5, 4, 8), [False, False])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "checkpointing"), [(7, False), (10_000, False), (50, True)])
def test_a_pack_is_its_trajectories_one_by_one(some: list[Trajectory], rows: int, checkpointing: bool) -> None:
    ours, theirs = model(PACKED, checkpointing=checkpointing), model("eager")
    found = pack_logprobs(ours, pack(some, "cpu"), 0.7, rows)
    expected = plain(theirs, some, 0.7)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    weights = torch.linspace(-1, 1, len(found))
    for logprobs in (found, expected):
        (logprobs * weights).sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        difference = (one.grad - other.grad).norm() / other.grad.norm()
        assert difference < 1e-4, f"{name}: {difference}"


def test_a_trajectory_does_not_see_what_lies_before_it_in_its_pack(some: list[Trajectory]) -> None:
    ours = model(PACKED)
    with torch.no_grad():
        alone = pack_logprobs(ours, pack(some[2:3], "cpu"), 1.0, 100)
        for others in (some[:3], [some[4], some[0], some[2]]):
            found = pack_logprobs(ours, pack(others, "cpu"), 1.0, 100)
            torch.testing.assert_close(found[-len(alone) :], alone, **TOLERANCE)


def test_the_head_is_never_whole() -> None:
    """Its parts are as large as asked: more logits than that are never in memory."""
    seen: list[int] = []

    class Head(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            seen.append(len(states))
            return super().forward(states)

    states = torch.randn(10, 4, requires_grad=True)
    head_logprobs(states, Head(4, 50), torch.arange(10), 1.0, 3).sum().backward()
    assert seen == [3, 3, 3, 1, *seen[4:]]
    assert sorted(seen[4:]) == [1, 3, 3, 3], "computed again in the backward pass"


def test_grouped_heads_and_a_tied_embedding_are_computed() -> None:
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.load_state_dict(ours.state_dict())
    some = [Trajectory((1, 2), (3, 4, 5), (0.0,) * 3, 1.0), Trajectory((6,), (7,), (0.0,), 1.0)]
    torch.testing.assert_close(pack_logprobs(ours, pack(some, "cpu"), 1.0, 2), plain(theirs, some, 1.0))


def test_attention_that_it_does_not_compute_is_refused() -> None:
    config = MistralConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    sliding = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    made: Pack = pack([Trajectory((1, 2), (3, 4, 5), (0.0,) * 3, 1.0)], "cpu")
    with pytest.raises(GrpoError, match="wants sliding_window"):
        pack_logprobs(sliding, made, 1.0, 2)
