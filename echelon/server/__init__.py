"""The parameter server: sharded, replicated, asynchronous within a bound, and it loses nothing that it acknowledged."""
