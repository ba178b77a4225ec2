"""The requests of AReaL 1.0.4 (areal/engine/sglang_remote.py): as transcribed here, and as its own class builds
them, of which that file alone is read, since the rest asks for a trainer's environment."""

import __future__

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass
class HttpRequest:
    endpoint: str
    payload: dict[str, Any]
    method: str = "POST"
    best_effort: bool = False


@dataclass
class Reply:
    """What it reads of an answer to `/generate`."""

    output_tokens: list[int]
    output_logprobs: list[float]
    stop_reason: str
    routed_experts: Any = None


@dataclass
class Rollout:
    """Its `ModelRequest`, with what it sends of `GenerationHyperparameters`."""

    input_ids: list[int]
    max_new_tokens: int
    greedy: bool = True
    image_data: None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def gconfig(self) -> SimpleNamespace:
        fixed = {"stop": None, "stop_token_ids": [], "use_beam_search": False, "top_p": 1.0, "top_k": 10**8}
        rest = {"temperature": 1.0, "ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0}
        return SimpleNamespace(**fixed, **rest, greedy=self.greedy, max_new_tokens=self.max_new_tokens)


class Transcribed:
    def build_generation_request(self, req: Rollout, with_lora: bool, version: int) -> HttpRequest:
        del with_lora, version
        config = req.gconfig
        sampling = {name: getattr(config, name) for name in ("top_p", "top_k", "max_new_tokens", "stop_token_ids")}
        sampling |= {name: getattr(config, name) for name in ("ignore_eos", "skip_special_tokens", "frequency_penalty")}
        sampling["temperature"] = 0.0 if config.greedy else config.temperature
        body = {"input_ids": req.input_ids, "image_data": req.image_data, "sampling_params": sampling}
        return HttpRequest("/generate", body | {"return_logprob": True, "stream": False})

    def parse_generation_response(self, response: dict[str, Any]) -> Reply:
        meta = response["meta_info"]
        pairs = [(each[1], each[0]) for each in meta["output_token_logprobs"]]
        tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
        return Reply(tokens, logprobs, meta["finish_reason"]["type"])

    def build_disk_weight_update_requests(self, meta: Any) -> SimpleNamespace:
        body = {"model_path": str(meta.path), "abort_all_requests": True}
        return SimpleNamespace(requests=[HttpRequest("/update_weights_from_disk", body)])

    def build_distributed_weight_update_requests(self, meta: Any, param_specs: list[Any]) -> SimpleNamespace:
        lists = {f"{name}s": [getattr(each, name) for each in param_specs] for name in ("name", "dtype", "shape")}
        body = {**lists, "group_name": meta.nccl_group_name, "abort_all_requests": True}
        return SimpleNamespace(requests=[HttpRequest("/update_weights_from_distributed", body)])

    def build_init_weights_group_request(self, addr: str, server_idx: int, meta: Any) -> HttpRequest:
        del addr
        parallel = meta.gen_allocation.parallel
        ranks = {"rank_offset": 1 + server_idx * parallel.tp_size, "world_size": parallel.world_size + 1}
        place = {"master_address": meta.nccl_master_address, "master_port": str(meta.nccl_master_port)}
        return HttpRequest(
            "/init_weights_update_group", {**place, **ranks, "backend": "gloo", "group_name": meta.nccl_group_name}
        )

    def get_pause_request(self) -> HttpRequest:
        return HttpRequest("/pause_generation", {})

    def get_resume_request(self) -> HttpRequest:
        return HttpRequest("/continue_generation", {})

    def get_health_check_request(self) -> HttpRequest:
        return HttpRequest("/health", {}, method="GET")


def its_own() -> Any:
    package = importlib.util.find_spec("areal")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "engine" / "sglang_remote.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SGLangBackend"]
    names: dict[str, Any] = {"HttpRequest": HttpRequest, "HttpGenerationResult": Reply, "format_host_for_url": str}
    names |= {
        "WeightUpdateRequests": SimpleNamespace,
        "current_platform": SimpleNamespace(communication_backend="gloo"),
    }
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), names)
    return names["SGLangBackend"]()


BUILDERS = {"transcribed": Transcribed, "its own": its_own}
