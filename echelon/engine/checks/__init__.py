"""Checks that watch a run while it trains: what plans assume about the model, the data and the other ranks."""
