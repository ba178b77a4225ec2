"""Hostile bodies for every route that a server has, ours and SGLang's: in turn mutated ones that were valid (`odd.py`),
and those that schemathesis makes of the server's own OpenAPI document (`schema.py`).

A process that ended, an answer of 5xx, one that did not come, and a control answer that changed are faults.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import httpx
import psutil

from benchmarks.lib.safety.odd import NO_JSON, TEXTS, Case, odd_body
from benchmarks.lib.safety.schema import cases_of
from tlt_server.api.fields.routes import TABLES
from tlt_server.process import Running, running_module
from tlt_server.results import Figures

BATCH = 25
EXAMPLES = 3
"""Of each kind that schemathesis draws for an operation at once; that it may draw takes it most of a minute."""
PATIENCE_S = 60.0
"""How long an answer may take: what is asked for here is refused at once, or ends with the context."""
UNKEPT = httpx.Limits(max_keepalive_connections=0)
"""A server may close a connection that is kept at the moment that it is used again."""
HEALTHY = {"text": "What is 3*4?\n", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "3*4"}], "max_tokens": 4}
NATIVE = {"text": "3*4", "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "stop": ["\n"]}}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2, "backend": "gloo"}
RANKS = {"rank_offset": 1, "world_size": 2}
TENSOR = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[2, 2]], "group_name": "g"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALID: dict[str, dict[str, Any]] = {
    "/generate": NATIVE,
    "/encode": NATIVE,
    "/classify": NATIVE,
    "/v1/completions": {"model": "m", "prompt": "3*4", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/invocations": CHAT,
    "/v1/embeddings": {"model": "m", "input": "3*4"},
    "/v1/classify": {"model": "m", "input": "3*4"},
    "/v1/tokenize": {"model": "m", "prompt": "3*4"},
    "/v1/detokenize": {"model": "m", "tokens": [5, 6]},
    "/v1/score": {"model": "m", "query": "3", "items": ["4"], "label_token_ids": [5]},
    "/v1/rerank": {"query": "3", "documents": ["4"]},
    "/v1/responses": {"model": "m", "input": "3*4", "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/api/chat": {**CHAT, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"model": "m", "prompt": "3*4", "stream": False, "options": {"num_predict": 4}},
    "/api/show": {"model": "m"},
    "/vertex_generate": {"instances": [{"text": "3*4"}], "parameters": {"sampling_params": {"max_new_tokens": 4}}},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {"torch_empty_cache": False},
    "/abort_request": {"rid": "a", "abort_all": False},
    "/begin_weight_update": {"selector": "target"},
    "/post_process_weights": {"restore_weights_before_load": True, "post_process_quantization": False},
    "/pull_weights": {"local_checkpoint_dir": "/nowhere/a", "source_dir": "/nowhere", "target_version": 1},
    "/update_weight_version": {"new_version": "a", "abort_all_requests": False},
    "/update_weights_from_disk": {"model_path": "/nowhere", "load_format": "auto", "manifest": {"a": 1}},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gAR9lC4="], "load_format": "direct"},
    "/update_weights_from_distributed": TENSOR,
    "/update_weights_from_ipc": {"zmq_handles": {"a": "ipc:///nowhere"}},
    "/init_weights_update_group": GROUP,
    "/destroy_weights_update_group": {"group_name": "g"},
    "/init_weights_send_group_for_remote_instance": {**GROUP, "ports": "1,2", "group_rank": 1},
    "/send_weights_to_remote_instance": {"master_address": "127.0.0.1", "ports": "1"},
    "/get_weights_by_name": {"name": "lm_head.weight", "truncate_size": 2},
    "/weights_checker": {"action": "checksum"},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/set_internal_state": {"server_args": {"pp_max_micro_batch_size": 8}},
    "/slow_down": {"forward_sleep_time": 0},
    "/open_session": {"capacity_of_str_len": 100, "session_id": "a"},
    "/close_session": {"session_id": "a"},
    "/configure_logging": {"log_requests": False, "log_level": "info"},
    "/parse_function_call": {"text": '{"name": "f"}', "tools": [TOOL], "tool_call_parser": "llama3"},
    "/separate_reasoning": {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/load_lora_adapter_from_tensors": {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": ["gAR9lC4="]},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/add_external_corpus": {"documents": ["a"]},
    "/remove_external_corpus": {"corpus_id": "a"},
    "/scale_elastic_ep": {"new_ep_size": 2},
    "/hicache/storage-backend": {"hicache_storage_backend": "file"},
    "/start_profile": {"num_steps": 0, "activities": ["CPU"]},
    # of vLLM's dialect
    "/init_weight_transfer_engine": {"init_info": {"master_address": "127.0.0.1", "master_port": 1, **RANKS}},
    "/update_weights": {"update_info": {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[2, 2]]}},
    "/finish_weight_update": {"weight_version": "a"},
    "/collective_rpc": {"method": "liveness_probe", "args": [], "kwargs": {}},
    "/reset_prefix_cache": {"reset_running_requests": False},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
    "/abort_requests": {"request_ids": ["a"]},
    "/tlt/v1/target/share": {"path": "/nowhere/a"},
    "/tlt/v1/drafter/update": {"path": "/nowhere", "version": 3},
    "/tlt/v1/drafter/freeze": {"frozen": False},
    "/tlt/v1/drafter/watchdog": {"mode": "observe"},
    "/tlt/v1/trainer": {"state": "off"},
    "/tlt/v1/strategy": {"mode": "fixed", "arm": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}},
    "/tlt/v1/strategy/learned": {"costs": {"a": 1}},
    "/tlt/v1/history": {"prompt": [5, 6], "responses": [[7, 8]], "version": 1, "namespace": "a"},
}
HOLD = {"/pause_generation", "/release_memory_occupation", "/pause", "/sleep", "/start_weight_update"}
UNDO = (
    ("/finish_weight_update", {}),
    ("/wake_up", {}),
    ("/end_weight_update", {}),
    ("/resume_memory_occupation", {}),
    ("/continue_generation", {"torch_empty_cache": False}),
)
"""What was rightly done is undone before the control answer is asked for, and where a response would wait for it."""


@dataclass(frozen=True)
class Route:
    """Of the server's own list, with the fields of its body and of its query."""

    method: str
    path: str
    fields: tuple[str, ...]
    query: tuple[str, ...]


def listed(url: str) -> list[Route]:
    """Every route of a server but those that only read, and take nothing."""
    document = httpx.get(f"{url}/openapi.json", timeout=30).json()
    found = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            query = tuple(each["name"] for each in described.get("parameters", ()) if each["in"] == "query")
            content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
            found.append(Route(method.upper(), path, tuple(_fields(content.get("schema", {}), document)), query))
    return found


def _fields(schema: Any, document: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    yield from schema.get("properties", {})
    for each in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from _fields(each, document)


def hostile(routes: list[Route], random: Random) -> Case:
    """One case, of a route drawn from all."""
    route = random.choice(routes)
    path = route.path.replace("{model}", "a").replace("{response_id}", random.choice(("a", "resp_a", "%00")))
    if route.query and random.random() < 0.5:
        value = random.choice(("", "-1", "1e999", "nan", "99999999999999999999", "a", *TEXTS[3:4]))
        path += f"?{random.choice(route.query)}={quote(value)}"
    if route.method in ("GET", "HEAD") and route.path not in VALID and random.random() < 0.7:
        return Case(route.method, path, b"")
    body = odd_body(VALID.get(route.path, {}), list(route.fields), random)
    kinds = ("application/json",) * 12 + (
        "",
        "text/plain",
        "multipart/form-data; boundary=a",
        "application/json;a=\xff",
    )
    return Case(route.method, path, body, random.choice(kinds))


def endless(url: str, random: Random) -> Iterator[Case]:
    """Of both kinds, in turn."""
    routes = listed(url)
    while True:
        by_schema = cases_of(url, EXAMPLES, random.getrandbits(32))
        random.shuffle(by_schema)
        for case in by_schema:
            yield case
            yield hostile(routes, random)


@dataclass
class Watched:
    """A server under fire, and what became of it."""

    server: Running
    counts: Counter[str] = field(default_factory=Counter)
    found: list[tuple[Case, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.server.url, timeout=PATIENCE_S, limits=UNKEPT)
        self._holds = False
        self._processes = self._alive()
        self._control = self._answer()

    def send(self, case: Case) -> None:
        self.counts["hostile_requests"] += 1
        path = case.path.split("?")[0]
        if self._holds and path in TABLES:  # it would wait until it is let go, as it should
            self._undo()
        headers = {"content-type": case.content_type.encode("latin-1")} if case.content_type else {}
        try:
            answer = self._http.request(case.method, case.path, content=case.body, headers=headers)  # type: ignore[arg-type]
        except httpx.TimeoutException:
            self._note("answers_5xx", case, "no answer")
        except httpx.TransportError as error:
            self._note("answers_5xx", case, f"{type(error).__name__}: {error}")
        else:
            self._holds |= path in HOLD and answer.status_code == 200
            if answer.status_code >= 500:
                self._note("answers_5xx", case, f"{answer.status_code} {answer.text[:300]}")

    def ended(self) -> bool:
        """Whether one of its processes is no longer what it was when this began."""
        return self._alive() != self._processes

    def check(self, batch: list[Case]) -> bool:
        """Whether it is still there, healthy, and says what it said at first; the faults are counted."""
        try:
            if not self.ended():
                self._undo()
                healthy = self._http.get("/health").status_code == 200
                if not healthy or self._answer() != self._control:
                    self._note("control_mismatches", batch[-1], f"healthy: {healthy}")
                return True
        except httpx.HTTPError as error:
            if not self.ended():
                self._note("control_mismatches", batch[-1], repr(error))
                return True
        self._note("server_ended", batch[-1], "a process ended")
        return False

    def _undo(self) -> None:
        for path, body in UNDO:
            self._http.post(path, json=body)
        self._holds = False

    def close(self) -> None:
        self._http.close()

    def _alive(self) -> set[tuple[int, str]]:
        processes = [psutil.Process(self.server.pid)]
        processes += processes[0].children(recursive=True)
        names = {(each.pid, each.name()) for each in processes if each.status() != psutil.STATUS_ZOMBIE}
        return {(pid, name) for pid, name in names if name.startswith(("python", "sglang"))}

    def _answer(self) -> Any:
        answer = self._http.post("/generate", json=HEALTHY)
        return answer.json()["output_ids"] if answer.status_code == 200 else answer.text

    def _note(self, figure: str, case: Case, why: str) -> None:
        self.counts[figure] += 1
        self.found.append((case, why))


def fire(watched: Watched, cases: Iterator[Case], count: int, logs: Path) -> bool:
    """Sends up to `count` cases; False where the server ended. What was found is added to `found.jsonl` in `logs`."""
    sent, alive = 0, True
    while alive and sent < count:
        batch = [next(cases) for _ in range(min(BATCH, count - sent))]
        for case in batch:
            watched.send(case)
            sent += 1
        alive = watched.check(batch)
    with (logs / "found.jsonl").open("a") as kept:
        for case, why in watched.found:
            line = {"method": case.method, "path": case.path, "body": case.body.decode("latin-1"), "why": why}
            kept.write(json.dumps(line | {"content_type": case.content_type}) + "\n")
    return alive


def measure(count: int, seed: int, logs: Path) -> Figures:
    """A server that ended is started anew, and what is left of `count` goes on there."""
    random, total, started = Random(seed), Counter[str](), 0
    while total["hostile_requests"] < count:
        log = logs / f"routes-{started}.log"
        with running_module(["tlt_server", "serve"], ["--random-seed", "7"], log, start_timeout=180) as server:
            watched = Watched(server)
            fire(watched, endless(server.url, random), count - total["hostile_requests"], logs)
            watched.close()
        total, started = total + watched.counts, started + 1
    names = ("hostile_requests", "server_ended", "answers_5xx", "control_mismatches")
    return {name: total[name] for name in names}


def corpus(path: Path) -> list[Case]:
    """Cases kept, a line each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Case(line["method"], line["path"], line["body"].encode("latin-1"), line.get("content_type", "application/json"))
        for line in lines
    ]


__all__ = ["NO_JSON", "Case", "Watched", "corpus", "fire", "hostile", "listed", "measure"]
