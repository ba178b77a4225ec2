"""What the front says of the fleet: of all members, each by its name, never one of them for the others."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from tlt_client.schemas import Fleet, FleetEvent, FleetMember, FleetTransaction

from tlt_server.errors import ServerFailed
from tlt_server.fleet.calls import OF_ONE, under
from tlt_server.fleet.control import Control
from tlt_server.fleet.links import Reply, refusal
from tlt_server.fleet.members import Member, State
from tlt_server.fleet.requests.passing import Data

TEXT = "text/plain; version=0.0.4; charset=utf-8"
SHOWN = 100
"""Events."""
SCRAPE_S = 5.0
REPLICAS = "/tlt/v1/replicas/"
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .+)")
_PART = re.compile(r"_(bucket|sum|count|total|created)$")
Headers = Mapping[str, str]


class Reads:
    """The front's GET routes."""

    def __init__(self, control: Control, data: Data) -> None:
        self._control, self._data, self._fleet = control, data, control.fleet
        self._links, self._limits = control.links, control.limits
        self._at_once: dict[str, Callable[[], Reply]] = {
            **dict.fromkeys(("/health", "/health_generate", "/liveness"), self._health),
            "/tlt/v1/fleet": lambda: Reply(200, msgspec.json.encode(self.fleet())),
            "/is_paused": self._is_paused,
        }
        self._asked: dict[str, Callable[[str, Headers], Awaitable[Reply]]] = {
            "/metrics": self._metrics,
            "/tlt/v1/status": self._status,
            "/get_world_size": self._world_size,
            **dict.fromkeys(("/get_weight_version", "/weight_version", "/weight_info"), self._weight_version),
            **dict.fromkeys(("/v1/loads", "/get_load", "/get_loads"), self._loads),
        }

    async def answer(self, path: str, target: str, headers: Headers) -> Reply | None:
        """None: no such route. headers: what of the caller's the members are shown."""
        if path in self._at_once:
            return self._at_once[path]()
        if path in self._asked:
            return await self._asked[path](target, headers)
        if path.startswith(REPLICAS):
            return await self._of_replica(target, headers)
        return await self._of_one(target, headers) if under(path, OF_ONE) else None

    def _health(self) -> Reply:
        return Reply(200 if self._fleet.enough else 503, b"")

    def _is_paused(self) -> Reply:
        return Reply(200, msgspec.json.encode({"is_paused": self._fleet.under_way.paused}))

    def fleet(self) -> Fleet:
        """The client's `Fleet`."""
        running, told = self._control.running, None
        if running is not None:
            told = FleetTransaction(
                call=f"{running.method} {running.path}",
                phase=running.plan.phase,
                version=running.end.version,
                members=tuple(running.bodies),
                waiting_for=tuple(sorted(running.plan.to_ask() - running.replies.keys())),
                since=running.since,
            )
        return Fleet(
            weight_version=self._fleet.version,
            min_ready=self._fleet.min_ready,
            paused=self._fleet.under_way.holds,
            held=self._data.counts.held,
            transaction=told,
            replicas=tuple(self._member(member) for member in self._fleet.members.values()),
            events=tuple(FleetEvent(*event) for event in self._fleet.events[-SHOWN:]),
        )

    def _member(self, member: Member) -> FleetMember:
        return FleetMember(
            name=member.name,
            url=member.url,
            state=member.state.value,
            why=member.why,
            weight_version=member.seen.weight_version if member.seen else None,
            running=self._data.running[member.name],
            since=member.since,
        )

    # -- of all --

    async def _all(self, target: str, headers: Headers, within_s: float | None = None) -> dict[str, Reply]:
        """What those that answer say to a GET, by name, in their order."""
        members = [member for member in self._fleet.members.values() if member.state is not State.RETIRED]
        within = within_s or self._limits.probe
        asking = (self._links.ask(member.url, "GET", target, None, headers, within) for member in members)
        replies = await asyncio.gather(*asking, return_exceptions=True)
        return {m.name: each for m, each in zip(members, replies, strict=True) if isinstance(each, Reply)}

    async def _status(self, target: str, headers: Headers) -> Reply:
        """A client's `Status` whose counters are sums, with each member's own under `replicas`."""
        said = await self._all(target, headers)
        ready = [member.name for member in self._fleet.ready() if member.name in said and said[member.name].ok]
        if not ready:
            return refusal(503, "no member is ready: GET /tlt/v1/fleet says why")
        each = {name: msgspec.json.decode(reply.body) for name, reply in said.items() if reply.ok}
        whole: dict[str, Any] = dict(each[ready[0]])
        whole["counters"] = _summed([status["counters"] for status in each.values()])
        passes, accepted = whole["counters"]["drafts"], whole["counters"]["accepted_tokens"]
        whole["accept_length"] = {"recent": None, "total": 1 + accepted / passes if passes else None}
        weights = {"version": self._fleet.publications, "weight_version": self._fleet.version}
        whole["versions"] = whole["versions"] | {"target": {**weights, "partial": self._fleet.under_way.wrote}}
        whole["help"] = f"{len(ready)} of {len(self._fleet.members)} members are ready: GET /tlt/v1/fleet has each"
        return Reply(200, msgspec.json.encode(whole | {"replicas": each}))

    async def _world_size(self, _target: str, _headers: Headers) -> Reply:
        if (keeper := self._control.keeper) is not None:
            return await self._get(keeper.url, "/get_world_size", {})
        members = self._fleet.in_service()
        try:
            sizes = await asyncio.gather(*(self._links.world(each.url, self._limits.probe) for each in members))
        except ServerFailed as error:
            return refusal(409, str(error))
        return (
            Reply(200, msgspec.json.encode({"world_size": sum(sizes)})) if sizes else refusal(503, "no member is ready")
        )

    async def _weight_version(self, _target: str, headers: Headers) -> Reply:
        """The fleet's; while a publication is under way what all members have of it, for trainers that look."""
        version = self._fleet.version
        if self._fleet.under_way.wrote:
            serving = {member.name for member in self._fleet.in_service()}
            said = {
                reply.body
                for name, reply in (await self._all("/get_weight_version", headers)).items()
                if name in serving
            }
            if len(said) != 1:
                return refusal(409, "a publication is under way, and members differ: GET /tlt/v1/fleet")
            return Reply(200, said.pop())
        return (
            Reply(200, msgspec.json.encode({"weight_version": version})) if version else refusal(503, "no member yet")
        )

    async def _loads(self, target: str, headers: Headers) -> Reply:
        said = [msgspec.json.decode(reply.body) for reply in (await self._all(target, headers)).values() if reply.ok]
        if not said or not all(isinstance(each, dict) and "loads" in each for each in said):
            return Reply(
                200,
                msgspec.json.encode([load for each in said for load in (each if isinstance(each, list) else [each])]),
            )
        return Reply(200, msgspec.json.encode(said[0] | {"loads": [load for each in said for load in each["loads"]]}))

    # -- of one --

    async def _of_one(self, target: str, headers: Headers) -> Reply:
        found = self._fleet.ready() or self._fleet.in_service() or self._fleet.waiting()
        if not found:
            return refusal(503, "no member is ready: GET /tlt/v1/fleet says why")
        return await self._get(found[0].url, target, headers)

    async def _of_replica(self, target: str, headers: Headers) -> Reply:
        name, slash, rest = target.removeprefix(REPLICAS).partition("/")
        if (name := unquote(name)) not in self._fleet.members:
            return refusal(404, f"no replica {name!r}: GET /tlt/v1/fleet has their names")
        return await self._get(self._fleet.members[name].url, slash + rest or "/", headers)

    async def _get(self, url: str, target: str, headers: Headers) -> Reply:
        try:
            return await self._links.ask(url, "GET", target, None, headers, self._limits.probe)
        except ServerFailed as error:
            return refusal(504, f"{url}{error}")

    # -- metrics --

    async def _metrics(self, _target: str, headers: Headers) -> Reply:
        registry = CollectorRegistry()
        registry.register(_Own(self._own()))
        members = await self._all("/metrics", headers, SCRAPE_S)
        said = labelled({name: each.body for name, each in members.items() if each.ok})
        return Reply(200, generate_latest(registry) + said, TEXT)

    def _own(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("tlt_fleet_members", "Members by state.", labels=["state"])
        for state in State:
            states.add_metric([state.value], sum(each.state is state for each in self._fleet.members.values()))
        requests = CounterMetricFamily(
            "tlt_fleet_requests", "Requests answered by members.", labels=["replica", "status"]
        )
        for (name, status), count in self._data.counts.requests.items():
            requests.add_metric([name, str(status)], count)
        resent = CounterMetricFamily(
            "tlt_fleet_resent", "Requests sent again, by what was with the member.", labels=["why"]
        )
        for why in ("refused", "dead", "quarantined"):
            resent.add_metric([why], self._data.counts.resent[why])
        running = GaugeMetricFamily("tlt_fleet_running", "Prompts on a member.", labels=["replica"])
        for name in self._fleet.members:
            running.add_metric([name], self._data.running[name])
        split = CounterMetricFamily(
            "tlt_fleet_split", "Batches dealt out to several members.", value=self._data.counts.split
        )
        held = GaugeMetricFamily("tlt_fleet_held", "Requests that wait.", value=self._data.counts.held)
        paused = GaugeMetricFamily("tlt_fleet_paused", "1 while a trainer holds.", value=self._fleet.under_way.holds)
        count = self._fleet.publications
        published = CounterMetricFamily("tlt_fleet_publications", "Publications of the target.", value=count)
        return [states, requests, resent, split, running, held, paused, published]


class _Own:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def labelled(texts: Mapping[str, bytes]) -> bytes:
    """Metrics of all members in Prometheus' text format, each sample with its member's name as `replica`. The samples
    of a family stand together, as the format wants it."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        label = 'replica="' + name.replace("\\", r"\\").replace('"', r"\"") + '"'
        for line in text.decode(errors="replace").splitlines():
            if line.startswith("# ") and len(words := line.split(" ", 3)) > 2:
                if line not in heads.setdefault(words[2], []):
                    heads[words[2]].append(line)
            elif found := _SAMPLE.fullmatch(line):
                metric, labels, rest = found.groups()
                family = metric if metric in heads else _PART.sub("", metric)
                samples.setdefault(family, []).append(f"{metric}{{{','.join(filter(None, (label, labels)))}}}{rest}")
    lines = [
        line
        for family in dict.fromkeys([*heads, *samples])
        for line in (*heads.get(family, ()), *samples.get(family, ()))
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _summed(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {key: sum(each[key] for each in counters) for key in counters[0] if key != "per_position"}
    depth = max(len(each["per_position"]) for each in counters)
    total["per_position"] = [
        sum(each["per_position"][i] for each in counters if i < len(each["per_position"])) for i in range(depth)
    ]
    return total
