"""A stand-in for a server of a fleet: its HTTP surface, versions and refusals, tokens out of a hash instead of a model.

    python -m benchmarks.lib.fleet.stand_in --port 30001 --log replica.jsonl

It logs what it samples, in the order in which it does. `POST /faults {"at": PHASE, "do": DEED}` has the next call of a
phase end, stop or refuse it: what it ends by is what a machine that is lost does, SIGKILL.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

PHASES = {
    "/get_weight_version": "prepare",
    "/pause_generation": "pause",
    "/continue_generation": "resume",
    "/tlt/v1/status": "verify",
    "/generate": "generate",
    "/flush_cache": "flush",
}
"""By route; an update has two: `apply`, before it writes, and `applied`, before it answers."""
DEEDS = ("kill", "stop", "refuse", "fail")
WEIGHTS, DIGEST = "weights.bin", "sha256"
"""Files of a checkpoint."""
VOCAB = 1000
MODEL = "stand-in"
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


def write_checkpoint(folder: Path, seed: int, size: int = 4096) -> Path:
    """Weights that a stand-in reads, and the digest that it holds them against."""
    folder.mkdir(parents=True, exist_ok=True)
    content = hashlib.sha256(str(seed).encode()).digest() * (size // 32)
    (folder / WEIGHTS).write_bytes(content)
    (folder / DIGEST).write_text(hashlib.sha256(content).hexdigest())
    return folder


def weights_of(folder: Path | None) -> bytes:
    """What stands for a checkpoint's weights; None: those that a stand-in starts with."""
    return hashlib.sha256(b"start").digest() if folder is None else bytes.fromhex((folder / DIGEST).read_text())


def tokens(weights: bytes, prompt: list[int], count: int) -> list[int]:
    """The response of these weights, token by token."""
    seed = weights + json.dumps(prompt).encode()
    return [int.from_bytes(hashlib.blake2b(seed + b"%d" % i, digest_size=4).digest()) % VOCAB for i in range(count)]


class StandIn:
    """One server's state and routes."""

    def __init__(self, log: Path, token_s: float, name: str) -> None:
        self.weights, self.weight_version, self.publications = weights_of(None), "default", 0
        self.paused, self.opened, self.wrote = False, False, False
        self.going = asyncio.Event()
        self.going.set()
        self.faults: dict[str, str] = {}
        self.read: dict[str, float] = {}
        self.strategy: dict[str, Any] = {"mode": "bandit"}
        self.aborted: dict[str, asyncio.Event] = {}
        self._token_s, self._name = token_s, name
        self._log = log.open("a", buffering=1)

    def tell(self, event: str, **what: Any) -> None:
        line = {"t": time.monotonic(), "event": event, "name": self._name, "pid": os.getpid(), **what}
        self._log.write(json.dumps(line) + "\n")

    def fault(self, phase: str) -> web.Response | None:
        """Does what was asked for at this phase, once."""
        deed = self.faults.pop(phase, None)
        if deed is None:
            return None
        self.tell("fault", phase=phase, deed=deed)
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        return _said(400 if deed == "refuse" else 500, success=False, message=f"{deed} at {phase}")

    # -- sampling --

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if (no := self._refused(request)) is not None:
            return no
        await self.going.wait()
        prompts = asked.get("input_ids")
        if not isinstance(prompts, list):
            return _said(400, message="input_ids: must be a list")
        several = bool(prompts) and isinstance(prompts[0], list)
        rids = asked.get("rid") or os.urandom(8).hex()
        count = asked.get("sampling_params", {}).get("max_new_tokens", 8)
        each = [
            self._sample(prompt, rid, count, request.headers.get("X-TLT-Seed"))
            for prompt, rid in zip(
                prompts if several else [prompts],
                rids if isinstance(rids, list) else [f"{rids}_{i}" for i in range(len(prompts))] if several else [rids],
                strict=True,
            )
        ]
        if asked.get("waits") == "once" and not asked.get("stream"):  # its time is then not that of many sleeps
            await asyncio.sleep(count * self._token_s)
            return web.json_response(_answer(rids, prompts, tokens(self.weights, prompts, count), "", None))
        if asked.get("stream"):
            return await self._streamed(request, each[0])
        answers = await asyncio.gather(*map(_last, each))
        return web.json_response(list(answers) if several else answers[0])

    async def _sample(self, prompt: list[int], rid: str, count: int, seed: str | None) -> Any:
        """Yields the answer after each token."""
        version, made = self.weight_version, tokens(self.weights, prompt, count)
        self.tell("begin", rid=rid, version=version, seed=seed)
        gone = self.aborted.setdefault(rid, asyncio.Event())
        reason = {"type": "length", "length": count}
        done = 0
        try:
            for done in range(1, count + 1):
                if self._token_s:
                    await asyncio.sleep(self._token_s)
                if gone.is_set():
                    reason = {"type": "abort", "message": "Aborted"}
                if done == max(1, count // 2):
                    self.fault("generate")
                yield _answer(rid, prompt, made[:done], version, reason if done == count or gone.is_set() else None)
                if gone.is_set():
                    break
                await self.going.wait()
        finally:
            self.aborted.pop(rid, None)
            self.tell("end", rid=rid, version=version, tokens=done, whole=done == count)

    async def _streamed(self, request: web.Request, steps: Any) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        async with contextlib.aclosing(steps):
            async for answer in steps:
                await out.write(b"data: " + json.dumps(answer | {"sent": time.monotonic()}).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out

    def _refused(self, request: web.Request) -> web.Response | None:
        wanted = request.headers.get("X-TLT-Weight-Version")
        if wanted is None or (wanted == self.weight_version and not self.wrote and not self.opened):
            return None
        self.tell("refused", wanted=wanted, version=self.weight_version)
        return _said(409, message=f"weight_version {wanted!r} is not active: {self.weight_version!r} is")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """vLLM's, of prompts in ids."""
        asked = await request.json()
        if (no := self._refused(request)) is not None:
            return no
        await self.going.wait()
        prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
        runs = [(prompt, sample) for prompt in prompts for sample in range(asked.get("n", 1))]
        rid, seed = asked.get("request_id") or os.urandom(8).hex(), request.headers.get("X-TLT-Seed")
        places = request.headers.get("X-TLT-Places") or ",".join(map(str, range(len(prompts))))
        names = [f"{rid}_{place}_{k}" for place in places.split(",") for k in range(asked.get("n", 1))]
        made = [
            _last(self._sample(prompt, name, asked.get("max_tokens", 8), seed))
            for (prompt, _), name in zip(runs, names, strict=True)
        ]
        choices = [
            {"index": i, "token_ids": answer["output_ids"], "finish_reason": "length", "prompt_token_ids": runs[i][0]}
            for i, answer in enumerate(await asyncio.gather(*made))
        ]
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": asked.get("max_tokens", 8) * len(runs)}
        return web.json_response({"id": rid, "choices": choices, "usage": usage})

    async def abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        for rid, gone in self.aborted.items():
            if asked.get("abort_all") or rid == asked.get("rid"):
                gone.set()
        self.tell("abort", rid=asked.get("rid"))
        return web.Response()

    # -- weights --

    async def update(self, request: web.Request) -> web.Response:
        """From disk, or of the bytes that it is sent; each is the whole."""
        asked = await request.json()
        if (no := self.fault("apply")) is not None:
            return no
        folder = asked.get("model_path") or asked.get("weight_dir")
        files = sorted(Path(folder).glob("*.safetensors")) if folder else []
        try:
            if files:  # a keeper's, of tensors that have one value each
                found = {name: float(each.flat[0]) for file in files for name, each in load_file(file).items()}
                self.read, digest = found, hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
                return await self._written(asked, digest)
            content = (Path(folder) / WEIGHTS).read_bytes() if folder else await request.read()
            digest = (Path(folder) / DIGEST).read_text() if folder else hashlib.sha256(content).hexdigest()
        except OSError as error:
            return _said(400, success=False, message=f"{folder}: {error.strerror}")
        if hashlib.sha256(content).hexdigest() != digest:
            return _said(400, success=False, message=f"{folder}: not what its digest says")
        return await self._written(asked, digest)

    async def _written(self, asked: dict[str, Any], digest: str) -> web.Response:
        await asyncio.sleep(self._token_s)
        self.weights, self.wrote = bytes.fromhex(digest), True
        if name := asked.get("weight_version"):
            self.weight_version = name
        self._settled()
        self.tell("wrote", version=self.weight_version, digest=digest)
        return self.fault("applied") or _said(200, success=True, message="written")

    def _settled(self) -> None:
        if self.wrote and not self.paused and not self.opened:
            self.wrote, self.publications = False, self.publications + 1

    async def name(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return _said(200, success=True, new_version=self.weight_version)

    async def pause(self, _request: web.Request) -> web.Response:
        self.paused = True
        self.going.clear()
        return _said(200, status="paused")

    async def go_on(self, _request: web.Request) -> web.Response:
        self.paused = False
        self._settled()
        self.going.set()
        return _said(200, status="resumed")

    async def begin(self, _request: web.Request) -> web.Response:
        self.opened = True
        return _said(200, success=True, message="open")

    async def end(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read() or b"{}")
        self.opened = False
        self.weight_version = asked.get("weight_version") or self.weight_version
        self._settled()
        return _said(200, success=True, message="closed")

    async def group(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.tell("group", asked=asked)
        return _said(200, success=True, message="joined")

    # -- what it is --

    async def status(self, _request: web.Request) -> web.Response:
        whole = not self.wrote and not self.opened
        target = {"version": self.publications, "weight_version": self.weight_version, "partial": not whole}
        said = {
            "version": "0", "sglang_version": "0", "models": {"target": MODEL, "drafter": None}, "speculation": False,
            "arm": None, "accept_length": {"recent": None, "total": None}, "uptime_s": 0.0, "help": "a stand-in",
            "counters": {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 4, "per_position": [2, 2]},
            "versions": {"target": target},
        }  # fmt: skip
        return web.json_response(said)

    async def set_strategy(self, request: web.Request) -> web.Response:
        self.strategy = await request.json()
        return web.json_response(self.strategy)

    async def metrics(self, _request: web.Request) -> web.Response:
        text = '# HELP sglang:up Whether.\n# TYPE sglang:up gauge\nsglang:up{a="b"} 1.0\n'
        text += '# TYPE s histogram\ns_bucket{le="+Inf"} 2\ns_sum 3\ns_count 2\n'
        return web.Response(text=text)

    async def set_faults(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["do"] in DEEDS, asked
        self.faults[asked["at"]] = asked["do"]
        return _said(200, faults=self.faults)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._faulty])

        def says(**what: Any) -> Answering:
            async def say(_request: web.Request) -> web.Response:
                return _said(200, **what)

            return say

        async def version(_request: web.Request) -> web.Response:
            return _said(200, weight_version=self.weight_version)

        async def read(_request: web.Request) -> web.Response:
            return web.json_response(self.read)

        async def strategy(_request: web.Request) -> web.Response:
            return web.json_response(self.strategy)

        posts: dict[str, Answering] = {
            "/generate": self.generate, "/v1/completions": self.completions, "/abort_request": self.abort,
            "/update_weights_from_disk": self.update, "/update_weights_from_tensor": self.update,
            "/update_weights_from_distributed": self.update, "/update_weights": self.update,
            "/update_weight_version": self.name, "/pause_generation": self.pause, "/pause": self.pause,
            "/continue_generation": self.go_on, "/resume": self.go_on, "/begin_weight_update": self.begin,
            "/start_weight_update": self.begin, "/end_weight_update": self.end, "/finish_weight_update": self.end,
            "/init_weights_update_group": self.group, "/init_weight_transfer_engine": self.group,
            "/destroy_weights_update_group": self.group, "/shutdown_weight_transfer_engine": self.group,
            "/flush_cache": says(success=True), "/reset_prefix_cache": says(success=True), "/faults": self.set_faults,
            "/tlt/v1/drafter/update": says(live={}), "/tokenize": says(tokens=[1, 2]),
        }  # fmt: skip
        gets: dict[str, Answering] = {
            "/health": says(), "/get_weight_version": version, "/weight_info": version, "/tlt/v1/status": self.status,
            "/metrics": self.metrics, "/read": read,
            "/v1/models": says(data=[{"id": MODEL}]), "/tlt/v1/strategy": strategy,
            "/server_info": says(tp_size=2, pp_size=1, dp_size=1, model_path=MODEL), "/flush_cache": says(success=True),
            "/tlt/v1/strategy/learned": says(learned=1), "/v1/loads": says(loads=[{"num_running_reqs": 1}]),
        }  # fmt: skip
        app.add_routes([web.post(path, answer) for path, answer in posts.items()])
        app.add_routes([web.get(path, answer) for path, answer in gets.items()])
        app.add_routes([web.put("/tlt/v1/strategy", self.set_strategy), web.put("/tlt/v1/strategy/learned", says())])
        return app

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> Any:
        phase = PHASES.get(request.path, "")
        no = self.fault(phase) if phase != "generate" else None
        return no if no is not None else await handler(request)


def _said(code: int, /, **what: Any) -> web.Response:
    return web.json_response(what, status=code)


def _answer(rid: str, prompt: list[int], made: list[int], version: str, reason: Any) -> dict[str, Any]:
    meta = {
        "id": rid, "finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(made),
        "cached_tokens": 0, "weight_version": version,
        "weight_versions": [{"version": version, "target_version": 0, "partial": False, "start": 0, "end": len(made)}],
    }  # fmt: skip
    return {"text": "", "output_ids": made, "meta_info": meta}


async def _last(steps: Any) -> Any:
    answer = None
    async for answer in steps:  # noqa: B007
        pass
    return answer


def main(argv: list[str]) -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--log", type=Path, required=True, help="a file, or a folder that it makes one in")
    flags.add_argument("--token-ms", type=float, default=1.0)
    flags.add_argument("--name", default="")
    asked = flags.parse_args(argv)

    async def app() -> web.Application:
        log = asked.log / f"{asked.port}.jsonl" if asked.log.is_dir() else asked.log
        server = StandIn(log, asked.token_ms / 1000, asked.name or str(asked.port))
        server.tell("start")
        return server.app()

    web.run_app(
        app(),
        host=asked.host,
        port=asked.port,
        print=None,
        access_log=None,
        shutdown_timeout=0.1,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
