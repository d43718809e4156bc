"""How data ranks exchange gradients: `Backend` is the protocol, `allreduce` and `parameter_server` implement it."""
