"""Studies: one question of a report a file."""
