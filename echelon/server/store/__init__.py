"""What a server holds: sparse tables, dense parameters, checkpoints."""
