"""One Ray and one server for all tests here. Each leaves the target and memory as it found them."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import cpu_workers
import pytest
import verl_cpu
from tlt_client import Client
from verl_cpu import Started, configured, parts, ray


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    paths = f"{verl_cpu.HERE}:{os.environ.get('PYTHONPATH', '')}"
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={
            "env_vars": {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_MODULES": "tlt_verl"},
            "worker_process_setup_hook": "cpu_workers.prepare",
        },
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def started(cluster: None) -> Started:
    config = configured("name=sglang", "load_format=auto", "engine_kwargs.sglang.random_seed=7")
    worker = ray.remote(cpu_workers.HybridWorker).remote(*parts(config))
    manager = verl_cpu.LLMServerManager.create(config, worker_group=SimpleNamespace(workers=[worker], world_size=1))
    return Started(manager, worker, manager.get_client(verl_cpu.FullyAsyncLLMServerClient))


@pytest.fixture
def server(started: Started) -> Iterator[Client]:
    """The same one over HTTP."""
    with Client(started.url) as client:
        yield client
