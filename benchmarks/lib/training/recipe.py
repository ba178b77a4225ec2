"""SpecForge's recipe, by its defaults (version 0.2.0): EAGLE-3 in seven steps, and a rate that rises and falls."""

from math import cos, pi

STEPS, DECAY = 7, 0.8
"""Of training-time test; weight of a step by that of the one before it."""
RATE, WARMUP, CLIP, BETAS = 1e-4, 0.015, 0.5, (0.9, 0.999)
"""The highest rate; share of the steps until it is reached; of the gradient's norm; AdamW's, without decay."""


def rate(step: int, steps: int, highest: float = RATE) -> float:
    """In a step, from 0 on: linear up to the highest, then half a cosine down to nothing."""
    rising = int(WARMUP * steps)
    if step < rising:
        return highest * (step + 1) / rising
    return highest * (1 + cos(pi * (step - rising) / (steps - rising))) / 2
