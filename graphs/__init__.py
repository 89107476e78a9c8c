"""HOW stages are wired and run."""
