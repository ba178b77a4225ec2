"""What happens to a request for rollouts in the HTTP process, from its body to the versions in its answer."""
