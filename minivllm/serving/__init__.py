"""The engine behind the APIs that clients speak: HTTP in one process, the engine in another."""
