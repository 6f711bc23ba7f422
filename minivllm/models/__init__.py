"""Models: the layers that families share, their configuration, and their registry."""
