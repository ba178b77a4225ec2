"""What each control route is asked, as a flow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from tlt_client import errors, wire
from tlt_client.flow import Call, Flow, Policy
from tlt_client.schemas import (
    Drafter,
    DrafterFreeze,
    DrafterTrainer,
    DrafterUpdate,
    DrafterWatchdog,
    Event,
    History,
    HistoryLoad,
    Load,
    SharedTarget,
    Speculation,
    Status,
    StepTimes,
    StrategyUpdate,
    TargetShare,
    TrainedSteps,
    TrainedUntil,
    TrainSteps,
)

T = TypeVar("T")

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class Control:
    """The flows of both clients, whose methods say what each does. timeout_s: of a call, where it has no other."""

    policy: Policy
    timeout_s: float

    def healthy(self) -> Flow[bool]:
        try:
            yield from self.policy.fetch(self.call("GET", "/health"))
        except errors.RequestUnserved:
            return False
        return True

    def status(self) -> Flow[Status]:
        return self._ask(Status, "GET", "/tlt/v1/status")

    def server_info(self) -> Flow[dict[str, Any]]:
        return self._ask(dict[str, Any], "GET", "/server_info")

    def world_size(self) -> Flow[int]:
        said: dict[str, int] = yield from self._ask(dict[str, int], "GET", "/get_world_size")
        return said["world_size"]

    def metrics(self) -> Flow[str]:
        body = yield from self.policy.ask(self.call("GET", "/metrics"))
        return body.decode(errors="replace")

    def abort(self, rid: str | None) -> Flow[None]:
        """None aborts everything."""
        if rid == "":
            raise errors.InvalidArgument("rid is empty, which the server ignores; abort_all() aborts everything")
        what = {"abort_all": True} if rid is None else {"rid": rid}
        yield from self.policy.ask(self.call("POST", "/abort_request", what))

    def flush_cache(self, wait_s: float) -> Flow[None]:
        if not 0 <= wait_s < math.inf:
            raise errors.InvalidArgument(f"wait_s={wait_s}: must be a number of seconds, at least 0")
        yield from self.policy.ask(self.call("POST", f"/flush_cache?timeout={wait_s}", more_s=wait_s))

    def load(self) -> Flow[Load]:
        loads = (yield from self._ask(wire.Loads, "GET", "/v1/loads?include=core")).loads
        return Load(sum(each.num_running_reqs for each in loads), sum(each.num_waiting_reqs for each in loads))

    # -- weights --

    def events(self, after: int) -> Flow[list[Event]]:
        return self._ask(list[Event], "GET", f"/tlt/v1/events?after={after}")

    def drafter(self) -> Flow[Drafter]:
        return self._ask(Drafter, "GET", "/tlt/v1/drafter")

    def update_drafter(self, update: DrafterUpdate, within_s: float) -> Flow[Drafter]:
        return self._ask(Drafter, "POST", "/tlt/v1/drafter/update", update, within_s)

    def roll_back_drafter(self) -> Flow[Drafter]:
        body = yield from self.policy.fetch(self.call("POST", "/tlt/v1/drafter/rollback"))
        return wire.decode(Drafter, body, "/tlt/v1/drafter/rollback")

    def freeze_drafter(self, frozen: bool) -> Flow[Drafter]:
        return self._ask(Drafter, "POST", "/tlt/v1/drafter/freeze", DrafterFreeze(frozen))

    def set_watchdog(self, mode: Literal["armed", "observe"]) -> Flow[Drafter]:
        return self._ask(Drafter, "PUT", "/tlt/v1/drafter/watchdog", DrafterWatchdog(mode))

    def strategy(self, update: StrategyUpdate | None = None) -> Flow[Speculation]:
        return self._ask(Speculation, "PUT" if update else "GET", "/tlt/v1/strategy", update)

    def step_times(self) -> Flow[StepTimes]:
        return self._ask(StepTimes, "GET", "/tlt/v1/strategy/step_times")

    def learned(self) -> Flow[dict[str, Any]]:
        return self._ask(dict[str, Any], "GET", "/tlt/v1/strategy/learned")

    def learn(self, learned: Mapping[str, Any]) -> Flow[None]:
        yield from self.policy.ask(self.call("PUT", "/tlt/v1/strategy/learned", learned))

    def history(self, load: HistoryLoad | None = None) -> Flow[History]:
        return self._ask(History, "POST" if load else "GET", "/tlt/v1/history", load)

    def forget_history(self, namespace: str | None) -> Flow[History]:
        where = "" if namespace is None else f"?namespace={quote(namespace, safe='')}"
        return self._ask(History, "DELETE", f"/tlt/v1/history{where}")

    def report_trainer(self, trainer: DrafterTrainer) -> Flow[None]:
        yield from self.policy.ask(self.call("POST", "/tlt/v1/trainer", trainer))

    def share_target(self, path: str, within_s: float) -> Flow[SharedTarget]:
        route = "/tlt/v1/target/share"
        body = yield from self.policy.fetch(self.call("POST", route, TargetShare(path), within_s))
        return wire.decode(SharedTarget, body, route)

    def train_drafter(self, steps: int, within_s: float, until: TrainedUntil) -> Flow[TrainedSteps]:
        """Sent once: a second one would train as much again."""
        route = "/tlt/v1/train/steps"
        body = yield from self.policy.fetch(self.call("POST", route, TrainSteps(steps, within_s, until), within_s))
        return wire.decode(TrainedSteps, body, route)

    # -- a step of a trainer --

    def pause_generation(self, mode: PauseMode) -> Flow[None]:
        yield from self.policy.ask(self.call("POST", "/pause_generation", {"mode": mode}))

    def continue_generation(self) -> Flow[None]:
        """Sent once: it ends a publication, and the answer to a second one would not say what that lacks."""
        yield from self.policy.fetch(self.call("POST", "/continue_generation", {}))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> Flow[None]:
        yield from self.policy.ask(self.call("POST", "/release_memory_occupation", wire.given(tags=tags)))

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> Flow[None]:
        yield from self.policy.ask(self.call("POST", "/resume_memory_occupation", wire.given(tags=tags)))

    def weight_version(self) -> Flow[str]:
        return (yield from self._ask(wire.WeightVersion, "GET", "/get_weight_version")).weight_version

    def update_weight_version(self, new_version: str) -> Flow[None]:
        """SGLang's own default aborts every request."""
        fields = {"new_version": new_version, "abort_all_requests": False}
        yield from self.policy.ask(self.call("POST", "/update_weight_version", fields))

    def begin_weight_update(self, selector: str | None, allow_partial: bool) -> Flow[None]:
        fields = wire.given(selector=selector, allow_partial=allow_partial or None)
        yield from self.policy.fetch(self.call("POST", "/begin_weight_update", fields))

    def end_weight_update(self) -> Flow[None]:
        yield from self.policy.fetch(self.call("POST", "/end_weight_update"))

    def update_weights_from_disk(
        self, model_path: str, weight_version: str | None, flush_cache: bool, within_s: float
    ) -> Flow[None]:
        fields = wire.update_fields(weight_version, flush_cache, model_path=model_path)
        yield from self.policy.ask(self.call("POST", "/update_weights_from_disk", fields, within_s))

    def call(self, method: str, path: str, fields: wire.Fields | None = None, more_s: float = 0.0) -> Call:
        """One of a control route, `more_s` longer than most may take."""
        body = None if fields is None else wire.encode(fields)
        until = self.policy.clock() + self.timeout_s + more_s
        return Call(method, path, until, body, admin=method != "GET")

    def _ask(
        self, kind: type[T], method: str, path: str, fields: wire.Fields | None = None, more_s: float = 0.0
    ) -> Flow[T]:
        """A request that may be processed twice without harm."""
        body = yield from self.policy.ask(self.call(method, path, fields, more_s))
        return wire.decode(kind, body, path.partition("?")[0])
