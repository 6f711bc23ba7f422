"""Kernels of quantised linear layers, Triton's and for CPUs."""
