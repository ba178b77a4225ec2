"""`python -m tlt_grpo`."""

from tlt_grpo.cli import main

main()
