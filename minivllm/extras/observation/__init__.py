"""What a listener is told of an engine's steps: enough to rebuild its state."""
