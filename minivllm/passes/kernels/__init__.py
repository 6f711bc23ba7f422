"""Triton kernels that passes put in."""
