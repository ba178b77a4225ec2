"""Drafters that can be trained, by their config.json."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from tlt_server.drafter.networks import Eagle, Eagle3
from tlt_server.errors import ConfigError

Network: TypeAlias = Eagle | Eagle3

NETWORKS: Mapping[str, type[Eagle] | type[Eagle3]] = {
    "LlamaForCausalLMEagle": Eagle,
    "Qwen2ForCausalLMEagle": Eagle,
    "LlamaForCausalLMEagle3": Eagle3,
}

# What SGLang's classes know and these networks do not: each changes what is computed.
_UNKNOWN = ("bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "mlp_bias")


def network(config: Mapping[str, Any]) -> Network:
    """The network of a drafter's config.json, its weights not yet set. Raises ConfigError: not a drafter that can be
    trained."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in NETWORKS:
        raise ConfigError(f"architecture {architecture}: no drafter that can be trained; {', '.join(NETWORKS)} can")
    if (layers := config.get("num_hidden_layers")) != 1:
        raise ConfigError(f"num_hidden_layers {layers}: a drafter that can be trained has 1")
    if (activation := config.get("hidden_act")) != "silu":
        raise ConfigError(f"hidden_act {activation}: a drafter that can be trained has silu")
    if config.get("target_hidden_size") not in (None, config.get("hidden_size")):
        raise ConfigError(
            "target_hidden_size: a drafter narrower than its target embeds tokens itself, and cannot be trained"
        )
    options = {**config, **(config.get("eagle_config") or {})}
    if unknown := [name for name in _UNKNOWN if options.get(name)]:
        raise ConfigError(f"{unknown[0]} {options[unknown[0]]}: not supported in a drafter to train; remove it")
    return NETWORKS[architecture](config)
