"""engine=simulated: the real scheduler over predicted step times."""
