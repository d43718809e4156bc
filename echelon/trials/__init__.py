"""Run the user's code without leaving a trace: snapshots, copies and random states that are put back."""
