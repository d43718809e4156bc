"""Ways of starting ranks: one file each, with one function

    launch(command, ranks, *, threads=None, environment=None, in_turn=False) -> int

that runs `command` once per rank, with the world in its environment, and returns when all have ended. It raises LaunchError
that blames the rank which failed first. environment.py is what every process started here inherits, handover.py what a
launcher and its ranks tell each other.
"""
