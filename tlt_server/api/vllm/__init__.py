"""vLLM's HTTP API, under `--dialect vllm`: its requests become SGLang's, SGLang's answers become vLLM's."""
