"""A shadow takes what is loaded into it; the model that it is made of never notices."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tlt_server.engine.loading.shadow import DryRun, Region, covers, shadow_of
from tlt_server.errors import UpdateRefused

Weights = Iterable[tuple[str, torch.Tensor]]


class Sharded(nn.Parameter):
    """As SGLang's: a subclass, with what its loader needs in `__dict__`."""


class Model(nn.Module):
    """Two layers that share a parameter, a list of modules, a loader bound to a layer; nothing that deepcopy copies."""

    def __init__(self) -> None:
        super().__init__()
        self.process_group = (each for each in ())  # cannot be copied
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.tied = self.layers[0]
        weight = Sharded(torch.zeros(2, 2), requires_grad=False)
        weight.weight_loader = self.load_transposed  # type: ignore[attr-defined]
        self.layers[1].weight = weight
        self.register_buffer("table", torch.arange(2))

    def load_transposed(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded.T)

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                loader = getattr(parameters[name], "weight_loader", lambda p, t: p.data.copy_(t))
                loader(parameters[name], tensor)


def test_loading_into_a_shadow_leaves_the_model_alone() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shadow = shadow_of(model, lambda parameter: parameter.data.clone())
    matrix = torch.arange(4.0).reshape(2, 2)
    shadow.load_weights([("layers.0.weight", matrix), ("layers.1.weight", matrix)])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(shadow.layers[0].weight, matrix)
    assert torch.equal(shadow.layers[1].weight, matrix.T)


def test_a_shadow_is_built_as_its_model() -> None:
    model = Model()
    shadow = shadow_of(model, torch.zeros_like)
    assert [name for name, _ in shadow.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert shadow.tied is shadow.layers[0]
    assert isinstance(shadow.layers[1].weight, Sharded)
    assert shadow.table is model.table


def test_a_dry_run_knows_what_would_be_written() -> None:
    model = Model()
    dry = DryRun(model)
    assert dry.takes("layers.0.weight", torch.ones(2, 2))
    assert dry.takes("layers.1.weight", torch.ones(2, 2))
    assert not dry.takes("layers.2.weight", torch.ones(2, 2))
    assert not model.layers[1].weight.any()


def test_many_in_one_load_are_told_apart() -> None:
    dry = DryRun(Model())
    names = ["layers.0.weight", "nowhere", "layers.1.weight"]
    alone = {name: dry.takes(name, torch.ones(2, 2)) for name in names}
    assert dry.each_takes({name: torch.ones(2, 2, device="meta") for name in names}) == alone
    assert [bool(alone[name]) for name in names] == [True, False, True]
    assert dry.parameter("layers.0.weight") == alone["layers.0.weight"]
    assert not dry.parameter("nowhere")


SPANS = st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda span: (span[0], span[0] + span[1]))


@given(st.lists(SPANS, max_size=6), SPANS)
def test_a_place_is_covered_where_each_of_its_elements_is(
    written: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    filled = {element for begin, end in written for element in range(begin, end)}
    regions = {Region(7, begin, end, dense=True) for begin, end in written}
    assert covers(regions, {Region(7, *wanted, dense=True)}) == (set(range(*wanted)) <= filled)
    assert not covers({Region(8, 0, 99, dense=True), Region(7, 0, 99, dense=False)}, {Region(7, *wanted, dense=True)})


class Odd(nn.Module):
    """Of a class that nobody can copy."""

    def __copy__(self) -> "Odd":
        raise TypeError("there is one of me")


def test_a_model_without_a_shadow_is_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    """It may serve all the same."""
    tried = DryRun(Odd())
    assert "Odd cannot be tried: there is one of me" in caplog.text
    with pytest.raises(UpdateRefused, match="there is one of me"):
        tried.takes("weight", torch.ones(1))
