"""Measurements, each run by `python -m bench.NAME`: overhead, startup, memory, parity, resume, forecast."""
