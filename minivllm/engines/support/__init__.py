"""What an engine under test supports: which knobs and GPUs, and whether it is installed."""
