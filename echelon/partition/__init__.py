"""How a model can be cut: over the tensor axis, along the sequence, into pipeline stages."""
