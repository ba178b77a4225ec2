"""What a weight update must satisfy before its first byte is written, on this rank and on all others.

Every route of upstream's ends in the target's `load_weights`: the tensors are all there by then, and none is written
yet. So that is where they are held against the schema. A distributed update has been received by then, which it must
be even to be refused: its sender waits for every rank.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tlt_server.engine.loading.schema import NamedTensor, Schema, Spec, not_finite, schema_of
from tlt_server.engine.loading.shadow import DryRun, Region, covers
from tlt_server.engine.ranks import objections
from tlt_server.engine.weights.head import Head
from tlt_server.errors import UpdateRefused, listed

logger = logging.getLogger(__name__)


class TargetFit:
    """Which tensors a target takes.

    A name of the start checkpoint is held against its shape and dtype there. Another one, as trainers send that merge
    or rename tensors, passes where the model's own loading code takes it, and counts for the tensors whose place in the
    parameters it fills. (A tensor that is too large can hide there.)
    """

    def __init__(self, model: Any, schema: Schema | None) -> None:
        self._schema = schema or {}
        self._dry_run = DryRun(model)
        self._places: dict[str, set[Region]] = {}
        self._tied = bool(getattr(model.config, "tie_word_embeddings", False))

    def misfit(self, name: str, tensor: Any) -> str | None:
        """Why a tensor cannot be loaded; None where it can."""
        if (expected := self._schema.get(name)) is not None:
            return expected.misfit(Spec.of(tensor))
        try:
            self._places[name] = self._dry_run.takes(name, tensor)
        except Exception as error:  # noqa: BLE001 - upstream's loaders refuse by any exception
            return f"the model cannot load it: {str(error) or type(error).__name__}"
        return None if self._places[name] or self._is_left_out(name) else "the model has no such tensor"

    def gaps(self, names: AbstractSet[str]) -> list[str]:
        """The tensors of the start checkpoint that are missing where only these were loaded."""
        absent = [name for name in self._schema if name not in names and not self._is_left_out(name)]
        if not absent:
            return []
        known = (self._places.get(name) or self._dry_run.parameter(name) for name in names - self._schema.keys())
        filled = set[Region]().union(*known)
        wanted = {name: self._schema[name] for name in absent if name not in self._places}
        sought = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in wanted.items()}
        try:
            self._places |= self._dry_run.each_takes(sought)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("where tensors of the checkpoint go is not known: %s", error)
        # one of no known place counts by its name alone, one that the model drops leaves no gap
        return [name for name in absent if name not in self._places or not covers(filled, self._places[name])]

    def _is_left_out(self, name: str) -> bool:
        """Names that upstream's loaders drop on purpose, and trainers send."""
        return "rotary_emb." in name or (self._tied and name.endswith("lm_head.weight"))


class Admission:
    """Guards `load_weights` of the target while an update is under way.

    fit: what it takes; None: everything (a target whose parameters, quantized, are not what its checkpoint holds).
    group: the CPU process group of the ranks that hold the target. head: an MTP head that it brings.
    """

    def __init__(self, model: Any, fit: TargetFit | None, group: Any, head: Head | None = None) -> None:
        self._model, self._fit, self._group, self._head = model, fit, group, head
        self._dtype = next(model.parameters()).dtype
        self._load = model.load_weights
        self._update: Update | None = None
        # override: where every route of upstream's has all tensors and has written none
        model.load_weights = self._load_admitted

    @contextmanager
    def update(self, selector: str | None = None, *, whole: bool = False) -> Iterator["Update"]:
        """Everything that is loaded inside belongs to one update, made on all ranks. `selector`: what of target and MTP
        head it is for; None: all. `whole`: it comes in one load, and may leave nothing out."""
        self._update = Update(self._group, whole, selector)
        try:
            yield self._update
        finally:
            self._update = None

    def admit(self, tensors: Iterable[NamedTensor], misfit: Callable[[str, Any], str | None]) -> list[NamedTensor]:
        """The tensors, all read, once every rank finds that they fit. Raises UpdateRefused: on every rank, where one
        does not fit on any."""
        assert self._update is not None
        self._update.raise_if_over()
        items = list(tensors)
        self._update.vote(self._objection(items, misfit))
        self._update.names |= {name for name, _ in items}
        return items

    def _objection(self, items: list[NamedTensor], misfit: Callable[[str, Any], str | None]) -> str | None:
        assert self._update is not None
        if found := [f"{name}: {why}" for name, tensor in items if (why := misfit(name, tensor))]:
            return listed(found, between="; ")
        if found := not_finite(items, self._dtype):
            return f"NaN or infinity in {listed(found)}"
        names, whole, alone = [name for name, _ in items], self._update.whole, self._update.selector == "draft"
        if whole and not alone and self._fit and (found := self._fit.gaps(set(names))):
            return f"{listed(found)}: not there. Begin a session with allow_partial to send a part"
        return self._head.objection(names, alone=alone, whole=whole) if self._head else None

    def writing(self) -> AbstractContextManager[None]:
        """While what was admitted is written."""
        assert self._update is not None
        return self._update.writing()

    def _load_admitted(self, weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        if self._update is None:
            return self._load(weights, *args, **kwargs)
        if self._update.objection is not None:
            self._update.vote(self._update.objection)
        admitted = self.admit(weights, self._fit.misfit if self._fit else lambda _name, _tensor: None)
        with self.writing():
            if self._head is not None and self._update.selector != "target":
                self._head.take(admitted)
            return None if self._update.selector == "draft" else self._load(admitted, *args, **kwargs)


class Update:
    """One update on one rank: it votes with the others until one objects, and then no more.

    Ranks vote in step: each time before they write, and at the end. A rank that fails anywhere casts one vote against,
    which meets whatever vote the others hold next.
    """

    def __init__(self, group: Any, whole: bool, selector: str | None) -> None:
        self._group = group
        self.whole, self.selector = whole, selector
        self.names: set[str] = set()
        """Of the tensors that were admitted."""
        self.refusal: str | None = None
        """Why no rank goes on; None while all do."""
        self.objection: str | None = None
        """Why it will be refused, alike on all ranks, once it was received: its sender waits until it is."""
        self.wrote = False
        """Whether this rank has begun to write."""
        self._failed = False

    def vote(self, objection: str | None) -> None:
        """Raises UpdateRefused where a rank objects."""
        if found := objections(self._group, objection):
            self.refusal = "; ".join(found)
            raise UpdateRefused(self.refusal)

    def raise_if_over(self) -> None:
        """Upstream answers a failed load from disk by another attempt, which the other ranks do not make."""
        if self.refusal is not None or self._failed:
            raise UpdateRefused(self.refusal or "it failed while it was written")

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.wrote = True
        try:
            yield
        except BaseException:
            self._failed = True
            raise


def direct_misfit(model: Any) -> Callable[[str, Any], str | None]:
    """For `load_format: direct`, which writes parameters by their own names: what does not fit, and why."""
    parameters = schema_of((name, parameter.data) for name, parameter in model.named_parameters())

    def misfit(name: str, tensor: Any) -> str | None:
        expected = parameters.get(name)
        return "the model has no such parameter" if expected is None else expected.misfit(Spec.of(tensor))

    return misfit
