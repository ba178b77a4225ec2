"""An update is admitted whole or not at all; what follows a refusal never reaches the model."""

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist

from tlt_server.engine.admission import Admission, TargetFit
from tlt_server.engine.schema import schema_of
from tlt_server.errors import UpdateRefused

Weights = Iterable[tuple[str, torch.Tensor]]


class Target(torch.nn.Module):
    """Two parameters; `merged` is loaded under a name that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})
        self.norm, self.merged = (torch.nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(2))
        self.loads = 0

    def load_weights(self, weights: Weights) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "broken":
                raise ValueError("no reason")
            if name in ("norm", "merged"):
                getattr(self, name).data.copy_(tensor)


@pytest.fixture(scope="module")
def group() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def target(group: object) -> Target:
    return Target()


@pytest.fixture
def admission(target: Target, group: object) -> Admission:
    fit = TargetFit(target, schema_of([("norm", torch.zeros(3))]))
    return Admission(target, fit, group)


ONES = torch.ones(3)


def test_what_fits_is_written(admission: Admission, target: Target) -> None:
    with admission.update() as update:
        target.load_weights([("norm", ONES), ("merged", 2 * ONES), ("lm_head.weight", ONES)])
    assert (update.wrote, update.refusal) == (True, None)
    assert torch.equal(target.norm, ONES)
    assert torch.equal(target.merged, 2 * ONES)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("norm", torch.ones(4), "shape"),
        ("norm", torch.ones(3, dtype=torch.int64), "dtype"),
        ("merged", torch.ones(2, 4), "cannot load"),
        ("unheard-of", ONES, "no such tensor"),
        ("broken", ONES, "no reason"),
    ],
)
def test_one_misfit_keeps_all_out(
    admission: Admission, target: Target, name: str, tensor: torch.Tensor, why: str
) -> None:
    with admission.update() as update, pytest.raises(UpdateRefused, match=why):
        target.load_weights(iter([("merged", ONES), (name, tensor)]))
    assert not update.wrote
    assert update.refusal is not None
    assert name in update.refusal
    assert not target.merged.any()


def test_after_a_refusal_nothing_more_is_loaded(admission: Admission, target: Target) -> None:
    """Upstream tries again where a load from disk fails."""
    with admission.update():
        for _ in range(2):
            with pytest.raises(UpdateRefused, match="norm"):
                target.load_weights([("norm", torch.ones(4))])
        with pytest.raises(UpdateRefused, match="norm"):
            target.load_weights([("norm", ONES)])
    assert not target.loads
    with admission.update():
        target.load_weights([("norm", ONES)])
    assert torch.equal(target.norm, ONES)


def test_outside_of_an_update_the_model_loads_as_ever(admission: Admission, target: Target) -> None:
    target.load_weights([("unheard-of", ONES)])
    assert target.loads == 1
