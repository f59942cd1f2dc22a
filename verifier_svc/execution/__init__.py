"""Running a step on an engine."""
