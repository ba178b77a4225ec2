"""The passes of a speculative step, and which arms can have one in common.

verification    by tokens, and whether they are a tree: depth does not reach the target
drafting        by arm: the drafter's passes end with the choice of the tokens that are verified
draft-extend    by depth: it reads the longest path that can have been accepted, not the tree
"""

from collections.abc import Callable, Hashable, Iterable, Mapping

from tlt_server.config import Arm
from tlt_server.strategy.arms import is_chain

PLAIN = "plain"
"""The one pass of a step that does not speculate."""
VERIFICATION, DRAFTING, DRAFT_EXTEND = "verification", "drafting", "draft-extend"
KEYS: Mapping[str, Callable[[Arm], Hashable]] = {
    VERIFICATION: lambda arm: (arm.num_draft_tokens, is_chain(arm)),
    DRAFTING: lambda arm: arm,
    DRAFT_EXTEND: lambda arm: arm.num_steps,
}
"""What of an arm a pass depends on."""


def alike(kind: str, arm: Arm, arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """Those of `arms` that can have this arm's pass."""
    key = KEYS[kind]
    return tuple(other for other in arms if key(other) == key(arm))
