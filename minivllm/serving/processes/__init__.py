"""The server's own process and the processes of its engines, and what they send each other."""
