"""A model's structure with other parameters in it: to load into, without touching the model that serves."""

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeVar

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

    Args:
        model: any model of SGLang's. One whose parameters are shared between modules has a shadow likewise.
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


class _Writes(TorchDispatchMode):
    """Counts the tensors that are written while it is in force."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor, torch.ops.aten.fill_.Scalar)
        return func(*args, **(kwargs or {}))


class DryRun:
    """Asks a model's own loading code what it would do with a tensor, on a shadow that has no memory.

    A model of which none can be made serves as well.
    """

    def __init__(self, model: Any) -> None:
        self._shadow, self._why = None, ""
        try:
            self._shadow = shadow_of(model, lambda parameter: torch.empty_like(parameter, device="meta"))
        except Exception as error:  # noqa: BLE001 - a class of upstream's, of which nothing is known
            self._why = f"{type(model).__name__} cannot be tried: {str(error) or type(error).__name__}"
            logger.warning("%s. Updates may hold the names of the start checkpoint only", self._why)

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor would go into a parameter. Raises whatever loading it would raise."""
        if self._shadow is None:
            raise UpdateRefused(self._why)
        with torch.no_grad(), _Writes() as writes:
            self._shadow.load_weights([(name, tensor)])
        return bool(writes.count)
