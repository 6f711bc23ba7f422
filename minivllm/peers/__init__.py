"""Other engines behind the interface of `minivllm.bench.engine`. Each says which knobs it honours."""
