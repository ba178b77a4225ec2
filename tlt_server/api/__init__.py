"""What runs inside SGLang's HTTP process: our routes, and the checks that a request passes before it is scheduled."""
