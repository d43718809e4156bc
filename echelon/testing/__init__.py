"""For our tests and for users' tests: ranks started once and reused, faults on a schedule, models."""
