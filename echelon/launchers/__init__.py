"""Ways of starting ranks: one file each, with one function

    launch(command, ranks, *, threads=None, environment=None, one_at_a_time=False) -> int

that runs `command` once per rank, with the world in its environment, and returns when all have ended. It raises LaunchError,
which blames the rank that failed first. environment.py is what every child process inherits, rank_ipc.py what a launcher
and its ranks exchange.
"""
