"""Drafters as they lie on disk, the networks that their tensors are of, a first one for a target that has none, and how
often one hits.

The formats are those that SGLang 0.5.17 loads as `LlamaForCausalLMEagle`, `Qwen2ForCausalLMEagle` and
`LlamaForCausalLMEagle3`. Nothing here imports SGLang.
"""
