"""C++ kernels for CPUs, and the common code of Triton kernels, which are stored beside the modules
that use them."""
