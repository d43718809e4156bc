"""How gradients and embedding rows travel: all-reduce, or a parameter server."""
