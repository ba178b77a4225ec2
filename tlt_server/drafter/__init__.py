"""Drafters as they lie on disk, the networks that their tensors are of, and a first one for a target that has none.

The formats are those that SGLang 0.5.17 loads as `LlamaForCausalLMEagle`, `Qwen2ForCausalLMEagle` and
`LlamaForCausalLMEagle3`. Nothing here imports SGLang.
"""
