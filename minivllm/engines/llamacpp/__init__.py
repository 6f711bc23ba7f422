"""engine=llamacpp: llama-server, started here."""
