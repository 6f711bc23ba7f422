"""Sessions of agents: how they are generated, read and replayed."""
