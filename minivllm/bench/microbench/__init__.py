"""Microbenchmarks: each kernel by itself."""
