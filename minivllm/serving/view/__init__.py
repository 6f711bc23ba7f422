"""The server's end of the live view: what the engine does, told to those who watch."""
