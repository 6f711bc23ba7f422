"""engine=minivllm: the engine of this package."""
