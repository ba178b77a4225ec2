"""How the demo's target and drafter were made: python -m tlt_server.demo.training.train."""
