"""Triton and C++ kernels of attention."""
