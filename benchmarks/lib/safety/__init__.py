"""What may befall a server and its trainer, a module a part: each has `measure(count, seed, logs) -> Figures`.

`python -m benchmarks safe` runs them; the tests run the same with small counts.
"""
