"""The tasks of the command line, one in each file, named by `_target_`."""
