"""State that forward changes: buffers and running statistics, kept as one device would keep them."""
