"""Training runs that others printed, forecast from their models, machines and plans: `python -m bench.published`."""
