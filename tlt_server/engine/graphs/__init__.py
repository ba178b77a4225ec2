"""CUDA graphs of arms: what is captured for which batch sizes, and the plans and memory that this takes."""
