"""`python -m tlt_server` is `tlt-server`."""

from tlt_server.cli import main

main()
