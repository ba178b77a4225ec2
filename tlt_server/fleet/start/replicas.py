"""Replicas by Ray Serve: each is an actor that owns a child server. Ray places, supervises and restarts it.

Nothing of a request goes through Ray.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.keys import Keys
from tlt_server.preflight import is_loopback
from tlt_server.process import await_answer, free_port, running, tail

APP, DEPLOYMENT = "tlt-fleet", "server"
START_S = 1800.0
"""That a server may take until it answers: a large checkpoint comes over a network."""
CHECK_S = 1.0
"""Between two looks at a child."""
MISSES = 3
"""Looks without an answer, one after another, after which a child is killed: it hangs."""
MEMBERS = "/tlt/v1/fleet/members"
SERVER = ("tlt_server", "serve")
WATCH = "while kill -0 {actor} 2>/dev/null; do sleep 1; done; kill -9 -- -{group} 2>/dev/null"
"""Ends a child whose actor is gone, however it went."""


class Shape(NamedTuple):
    """What each replica is. flags: of the server. front: its URL. logs: a folder on the replica's machine. module: the
    Python module that serves, with its words before the flags."""

    flags: tuple[str, ...]
    front: str
    logs: str
    keys: Keys = Keys()
    probe_s: float = 10.0
    module: tuple[str, ...] = SERVER


class Replica:
    """The actor. Its child is another member each time: it has another port, and another name."""

    def __init__(self, shape: Shape) -> None:
        """ServerFailed: the child ended, or never answered; Ray tries again."""
        import ray
        from ray import serve

        self._shape, self._misses, self._ends = shape, 0, contextlib.ExitStack()
        self.name = f"replica-{serve.get_replica_context().replica_id.unique_id[:8]}"
        local = is_loopback(httpx.URL(shape.front).host)
        host = "127.0.0.1" if local else ray.util.get_node_ip_address()
        port = free_port()
        self.url, self._log = f"http://{host}:{port}", Path(shape.logs) / f"{self.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._child = self._started(host, port)
        try:
            await_answer(self._child, f"{self.url}/health", self._log, START_S)
        except ServerFailed as error:
            self._tell("DELETE", why=str(error))
            self._kill()
            raise
        self._tell("POST", url=self.url)

    def _started(self, host: str, port: int) -> subprocess.Popen[bytes]:
        shape = self._shape
        keys = {"TLT_API_KEY": shape.keys.api, "TLT_ADMIN_API_KEY": shape.keys.admin}
        environment = {name: key for name, key in keys.items() if key}
        command = [*shape.module, "--host", host, "--port", str(port), *shape.flags]
        child = self._ends.enter_context(running(command, self._log, environment=environment))
        watch = WATCH.format(actor=os.getpid(), group=child.pid)
        subprocess.Popen(["sh", "-c", watch], start_new_session=True)
        return child

    async def check_health(self) -> None:
        """Ray asks; RuntimeError: start another one in its place. A front that was started anew hears where it is."""
        if self._child.poll() is None:
            try:
                async with httpx.AsyncClient(timeout=self._shape.probe_s) as client:
                    await client.get(f"{self.url}/get_weight_version")
                self._misses = 0
            except httpx.TransportError as error:
                self._misses += 1
                if self._misses >= MISSES:
                    logging.warning("%s hangs, and is killed: %s", self.name, error)
                    self._kill()
        if self._child.poll() is not None:
            why = f"its process ended with exit code {self._child.returncode}"
            self._tell("DELETE", why=why)
            raise RuntimeError(f"{self.name}: {why}:\n{tail(self._log)}")
        self._tell("POST", url=self.url)

    def _tell(self, method: str, **what: str) -> None:
        """The front may be away for a while: it is told again."""
        keys = self._shape.keys
        key = keys.admin or keys.api
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with contextlib.suppress(httpx.TransportError):
            httpx.request(
                method, self._shape.front + MEMBERS, json={"name": self.name, **what}, headers=headers, timeout=5
            )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._ends.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None and self._child.poll() is None:
            self._tell("DELETE", why="Ray ended it")
            self._kill()


def deployed(count: int, address: str | None, gpus: float | None, shape: Shape, say: Callable[[str], None]) -> None:
    """Returns when all replicas answer; those that a front before this one has left are kept.

    Raises ConfigError: Ray Serve is not installed, or no cluster is at that address.
    Raises ServerFailed: a server does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what runs here
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--replicas: {error}. Install tlt-server[fleet], or give --member for running servers"
        ) from error
    # without a word Ray joins any cluster that it finds on this machine, whose end is another's
    say("ray         " + ("starts on this machine" if address is None else f"joins {address}"))
    try:
        ray.init(address or "local", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--address {address}: {str(error).splitlines()[0]}") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    node = "127.0.0.1" if address is None else ray.util.get_node_ip_address()
    shape = shape._replace(front=as_reached(shape.front, node))
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    if APP in serve.status().applications:
        say("ray         has the replicas that the front before this one started; they are kept, as they are")
        return
    has = ray.cluster_resources()
    each = gpus if gpus is not None else ranks(shape.flags) if has.get("GPU") else 0
    options = {"num_cpus": min(1.0, has.get("CPU", 1.0) / count), "num_gpus": each}
    made: Any = serve.deployment(Replica).options(
        name=DEPLOYMENT, num_replicas=count, ray_actor_options=options, health_check_period_s=CHECK_S,
        health_check_timeout_s=MISSES * shape.probe_s + 30, graceful_shutdown_timeout_s=2.0, max_ongoing_requests=1,
    )  # fmt: skip
    began = time.monotonic()
    try:
        serve.run(made.bind(shape), name=APP, route_prefix=None)
    except RuntimeError as error:
        raise ServerFailed(f"no replica starts, by {shape.logs}: {error}") from error
    say(f"ray         {count} replicas answer after {time.monotonic() - began:.0f} s")


def end(address: str | None) -> None:
    """Ends the replicas, and Ray if it was started for them. ServerFailed: the cluster is gone before them."""
    import ray

    if not ray.is_initialized():
        return
    from ray import serve

    try:
        if address is None:
            serve.shutdown()
        else:
            serve.delete(APP)
    except ray.exceptions.RayError as error:
        raise ServerFailed(f"the replicas were not ended, Ray does not answer: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def as_reached(front: str, node: str) -> str:
    """The URL by which replicas reach a front: one that listens at all addresses is at that of its node."""
    url = httpx.URL(front)
    return str(url.copy_with(host=node)) if url.host in ("0.0.0.0", "::") else front


def ranks(flags: Sequence[str]) -> int:
    """GPUs that a server with these flags has."""
    total = 1
    for names in (("--tp-size", "--tp", "--tensor-parallel-size"), ("--pp-size", "--pp", "--pipeline-parallel-size"),
                  ("--dp-size", "--dp", "--data-parallel-size")):  # fmt: skip
        for index, word in enumerate(flags):
            flag, equals, value = word.partition("=")
            if flag in names:
                given = value if equals else flags[index + 1] if index + 1 < len(flags) else ""
                total *= int(given) if given.isdecimal() else 1
    return total
