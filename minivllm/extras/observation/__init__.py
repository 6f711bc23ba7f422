"""What is reported of an engine's steps: enough to rebuild its state."""
