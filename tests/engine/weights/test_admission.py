"""An update is admitted whole or not at all; what follows a refusal never reaches the model."""

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist

from tlt_server.engine.loading.schema import schema_of
from tlt_server.engine.weights.admission import Admission, TargetFit
from tlt_server.errors import UpdateRefused

Weights = Iterable[tuple[str, torch.Tensor]]


class Target(torch.nn.Module):
    """Parameters; `merged` is loaded under a name that no checkpoint holds, `pair` also in two parts, rows 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})
        self.norm, self.merged = (torch.nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(2))
        self.pair = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights: Weights) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "broken":
                raise ValueError("no reason")
            if name in ("norm", "merged", "pair"):
                getattr(self, name).data.copy_(tensor)
            if name in ("first", "second"):
                self.pair.data[int(name == "second")].copy_(tensor)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_not_finite_keeps_all_out(
    admission: Admission, target: Target, value: float, dtype: torch.dtype
) -> None:
    """In the target's own dtype, here float32: what is too large for it would be infinite there."""
    bad = torch.tensor([1.0, value, 2.0], dtype=torch.float64).to(dtype)
    with admission.update() as update, pytest.raises(UpdateRefused, match="NaN or infinity in merged"):
        target.load_weights([("norm", ONES), ("merged", bad)])
    assert not update.wrote
    assert not target.norm.any()


SCHEMA = schema_of([("norm", ONES), ("first", ONES), ("second", ONES), ("lm_head.weight", ONES), ("unused", ONES)])
"""The last is in the checkpoint, and the model drops it; the head is tied."""


@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        (["norm", "first", "second"], []),
        (["norm", "pair"], []),
        (["norm", "second"], ["first"]),
        (["pair"], ["norm"]),
        (["merged"], ["norm", "first", "second"]),
        ([], ["norm", "first", "second"]),
    ],
)
def test_what_is_missing_of_a_target(target: Target, sent: list[str], missing: list[str]) -> None:
    """A tensor under another name counts for those whose place it takes."""
    fit = TargetFit(target, SCHEMA)
    shapes = {"pair": torch.ones(2, 3)}
    assert [fit.misfit(name, shapes.get(name, ONES)) for name in sent] == [None] * len(sent)
    assert fit.gaps(set(sent)) == missing
    assert fit.gaps(set(sent)) == missing


def test_a_load_that_must_be_whole_is_all_or_nothing(target: Target, group: object) -> None:
    admission = Admission(target, TargetFit(target, SCHEMA), group)
    with admission.update(whole=True) as update, pytest.raises(UpdateRefused, match="second: not there"):
        target.load_weights([("norm", ONES), ("first", ONES)])
    assert not update.wrote
    with admission.update(whole=True) as update:
        target.load_weights([("norm", ONES), ("pair", torch.ones(2, 3))])
    assert (update.wrote, update.names) == (True, {"norm", "pair"})
    assert target.pair.all()
