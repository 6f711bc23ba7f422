"""The server's end of the live view: what the engine does, for those who watch."""
