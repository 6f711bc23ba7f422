"""Kernels in C++ for CPUs, and what the Triton kernels, which stay beside their users, share."""
