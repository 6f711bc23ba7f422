"""The process of HTTP and the process of the engine, and what they send each other."""
