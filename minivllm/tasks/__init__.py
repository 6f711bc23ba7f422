"""Tasks: one a file, named by `_target_`."""
