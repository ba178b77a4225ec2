"""The transaction under way: what was asked for, by whom, and what members said."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlt_server.fleet.calls import Call, merged
from tlt_server.fleet.links import Reply, refusal
from tlt_server.fleet.members import Ending
from tlt_server.fleet.transaction import Outcome, Publication, Transaction


@dataclass
class Running:
    """The transaction under way. headers: the caller's, for the members' keys."""

    call: Call
    method: str
    target: str
    path: str
    headers: Mapping[str, str]
    bodies: dict[str, bytes]
    broadcast: bool
    plan: Transaction
    since: float
    before: Publication
    end: Ending
    replies: dict[str, Reply] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether a publication ends with it."""
        return self.end.over and self.end.after.wrote


def answer_of(running: Running, min_ready: int) -> Reply:
    """What the trainer is told of one that is over."""
    plan = running.plan
    lost = {name: f"{name}: {why}" for name, why in sorted(plan.lost.items())}
    if plan.outcome is Outcome.COMMITTED:
        first = [running.replies[name] for name in running.bodies if name in plan.done]
        body = merged(running.path, [reply.body for reply in first], sorted(lost))
        return Reply(first[0].status, body, first[0].type)
    if plan.outcome is Outcome.SCARCE:
        few = f"{len(plan.done)} of {min_ready} members that must be ready"
        return refusal(409, f"only on {few}; " + "; ".join(lost.values()))
    refused = [name for name in running.bodies if name in running.replies and not running.replies[name].ok]
    if not lost and len(refused) == len(running.bodies):
        return running.replies[refused[0]]  # all say no: one server would say the same
    each = [f"{name}: {running.replies[name].body[:300].decode(errors='replace')}" for name in refused]
    return refusal(409, "nothing was changed: " + "; ".join([*each, *lost.values()]))
