"""Triton kernels of the modules that passes put in place of others."""
