"""The command line: one thin file per verb. Nothing here imports torch before a verb needs it."""
