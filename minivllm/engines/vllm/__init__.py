"""engine=vllm, in process, and engine=vllm_server."""
