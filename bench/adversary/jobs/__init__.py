"""The hostile jobs, by what they attack. Plain PyTorch: the judge loads them where echelon cannot be imported."""
