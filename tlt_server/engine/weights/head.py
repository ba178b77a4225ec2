"""An MTP head that the target's publications bring, by whichever route they come."""

from collections.abc import Sequence
from typing import Any

from tlt_server.config import HeadSource, ServerConfig
from tlt_server.engine.loading.schema import NamedTensor
from tlt_server.engine.weights.swap import DrafterWeights
from tlt_server.errors import UpdateRefused, listed


class Head:
    """Its tensors are staged as they come, whoever else's come with them, and made active once all are there: never a
    part of them, but where a publication may be a part."""

    def __init__(self, weights: DrafterWeights) -> None:
        self._weights = weights
        self._came: set[str] = set()

    @property
    def came(self) -> bool:
        """Whether something is staged."""
        return bool(self._came)

    @property
    def missing(self) -> Sequence[str]:
        """Of its tensors, those that have not come; empty where nothing has."""
        return sorted(self._weights.names - self._came) if self._came else ()

    def objection(self, names: Sequence[str], *, alone: bool, whole: bool) -> str | None:
        """Why tensors of these names cannot be loaded; None where they can. alone: whether they are for the head alone;
        whole: whether nothing comes after them."""
        missing = sorted(self._weights.names - set(names))
        if len(missing) < len(self._weights.names):
            return f"{listed(missing)}: not there. Send all of the MTP head, or none" if missing and whole else None
        return f"selector draft: none of its tensors is the MTP head's, as {missing[0]} is" if alone else None

    def take(self, tensors: Sequence[NamedTensor]) -> None:
        """Stages those of them that are the head's."""
        own = [(name, tensor) for name, tensor in tensors if name in self._weights.names]
        if own and not self._came:
            self._weights.restage()
        self._weights.load(own)
        self._came |= {name for name, _ in own}

    def drop(self) -> None:
        """Forgets what is staged: it is made active, or its publication has failed, or is another."""
        self._came.clear()

    def ended(self) -> str | None:
        """Drops what is staged, its publication having ended. Returns why the head stays as it was, where a part of it
        had come."""
        missing = self.missing
        self.drop()
        return f"the MTP head stays as it was: its publication lacks {listed(missing)}" if missing else None


def check_selector(head: Head | None, selector: str | None, load_format: str | None = None) -> None:
    """Raises UpdateRefused: what an update is for is not to be had here, or not in this format."""
    if selector == "draft" and head is None:
        raise UpdateRefused("selector draft: the drafter is updated by POST /tlt/v1/drafter/update")
    if selector == "draft" and load_format not in (None, "auto", "flattened_bucket"):
        raise UpdateRefused(f"selector draft: load_format {load_format} writes to the target alone. Leave it out")
    if selector not in (None, "target", "draft", "all"):
        raise UpdateRefused(f"selector {selector!r}: must be target, draft or all")


def head_of(draft_worker: Any) -> Head | None:
    """None where the drafter is no MTP head, or one whose updates come by themselves."""
    weights: DrafterWeights | None = getattr(draft_worker, "weights", None)
    if weights is None or not (weights.is_head and weights.names):
        return None
    return Head(weights) if ServerConfig.from_environment().mtp is HeadSource.TARGET else None
