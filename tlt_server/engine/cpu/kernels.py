"""The module that SGLang 0.5.17 imports as `sgl_kernel` on a machine without a GPU, in plain torch.

These are the functions that EAGLE decoding takes from it, under upstream's names and argument names (its misspelt
`retrive` included), with upstream's contracts on what is written in place. They are also what GPU kernels are tested
against. Nothing here registers `torch.ops.sgl_kernel.*`: the mere presence of such an operator makes upstream take its
AMX code paths.
"""

from tlt_server.engine.cpu.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from tlt_server.engine.cpu.tree import build_tree_kernel_efficient_cpu
from tlt_server.engine.cpu.verification import verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
