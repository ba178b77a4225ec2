"""A model's structure with other parameters in it: to load into, without touching the model that serves."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tlt_server.errors import UpdateRefused

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def shadow_of(model: M, tensor_for: Callable[[nn.Parameter], torch.Tensor]) -> M:
    """A model of the same classes, config and buffers, whose parameters are its own.

    `copy.deepcopy` fails on SGLang's models, which hold process groups, and its parameters keep what their loaders need
    (the loader itself, which dimension is sharded) in `__dict__`, which `Parameter.__deepcopy__` loses.

    tensor_for: the shadow's tensor for a parameter, of its shape and dtype, on whatever device.
    """
    made: dict[int, Any] = {}

    def parameter(old: nn.Parameter | None) -> nn.Parameter | None:
        if old is not None and id(old) not in made:
            new = nn.Parameter(tensor_for(old), requires_grad=False)
            new.__class__ = old.__class__
            new.__dict__.update(old.__dict__)
            made[id(old)] = new
        return None if old is None else made[id(old)]

    def module(old: nn.Module | None) -> Any:
        if old is not None and id(old) not in made:
            new = made[id(old)] = copy.copy(old)
            new._parameters = {name: parameter(each) for name, each in old._parameters.items()}
            new._buffers = dict(old._buffers)
            new._modules = {name: module(each) for name, each in old._modules.items()}
        return None if old is None else made[id(old)]

    shadow: M = module(model)
    return shadow


class Region(NamedTuple):
    """Elements of a parameter, as they lie in memory: [begin, end) of its storage, and whether it is all of them."""

    storage: int
    begin: int
    end: int
    dense: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        begin = tensor.storage_offset()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.untyped_storage()._cdata, begin, begin + span, span == tensor.numel())


def covers(written: AbstractSet[Region], wanted: AbstractSet[Region]) -> bool:
    """Whether all that is wanted was written, in whatever parts."""
    return all(region in written or _is_within(region, written) for region in wanted)


def _is_within(region: Region, written: AbstractSet[Region]) -> bool:
    reached = region.begin
    for part in sorted(part for part in written if part.dense and part.storage == region.storage):
        if part.begin > reached:
            return False
        reached = max(reached, part.end)
        if reached >= region.end:
            return True
    return False


class _Writes(TorchDispatchMode):
    """Notes what is written while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: set[Region] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor, torch.ops.aten.fill_.Scalar):
            self.regions.add(Region.of(args[0]))
        return func(*args, **(kwargs or {}))


class DryRun:
    """Asks a model's own loading code what it would do with a tensor, on a shadow that has no memory. A model of which
    none can be made serves as well."""

    def __init__(self, model: Any) -> None:
        self._shadow: Any = None
        self._why = ""
        try:
            self._shadow = shadow_of(model, lambda parameter: torch.empty_like(parameter, device="meta"))
        except Exception as error:  # noqa: BLE001 - a class of upstream's, of which nothing is known
            self._why = f"{type(model).__name__} cannot be tried: {str(error) or type(error).__name__}"
            logger.warning("%s. Updates may hold the names of the start checkpoint only", self._why)

    def takes(self, name: str, tensor: torch.Tensor) -> set[Region]:
        """What the tensor would be written to. Raises whatever loading it would raise."""
        shadow = self._there()
        with torch.no_grad(), _Writes() as writes:
            shadow.load_weights([(name, tensor)])
        found: set[Region] = writes.regions
        return found

    def each_takes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, set[Region]]:
        """As `takes`, of many in one load, which costs a model of many parameters far less. Raises RuntimeError: the
        model's loading code does not take one after the other."""
        shadow = self._there()
        found: dict[str, set[Region]] = {}
        with torch.no_grad(), _Writes() as writes:

            def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in tensors.items():
                    writes.regions = found[name] = set()
                    yield name, tensor
                writes.regions = set()

            shadow.load_weights(one_by_one())
        if writes.regions:
            raise RuntimeError("tensors were loaded after all of them were read")
        return found

    def parameter(self, name: str) -> set[Region]:
        """All of a parameter, by its own name."""
        found = None if self._shadow is None else dict(self._shadow.named_parameters()).get(name)
        return set() if found is None else {Region.of(found)}

    def _there(self) -> Any:
        if self._shadow is None:
            raise UpdateRefused(self._why)
        return self._shadow
