"""C++ kernels for CPUs, and the loader that compiles them."""
