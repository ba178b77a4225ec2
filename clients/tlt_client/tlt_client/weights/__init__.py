"""What sends a target's tensors. Only `tensors` and `group` import torch, once something is to be sent."""
