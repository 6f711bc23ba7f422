"""Hydra finds its plugins in the namespace `hydra_plugins`; ours is the sweeper."""
