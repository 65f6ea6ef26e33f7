"""Training steps that run for real, in child processes: what they need of a device, and why they fail."""
