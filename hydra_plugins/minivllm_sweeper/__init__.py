"""Our sweepers, in the namespace `hydra_plugins` where Hydra finds plugins."""
