"""Checkpoints: raw tensor files and JSON, every byte checked, nothing pickled."""
