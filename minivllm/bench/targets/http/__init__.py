"""The HTTP client of servers under test, and the streams of their answers."""
