"""The plan made live: it executes exactly what the plan says."""
