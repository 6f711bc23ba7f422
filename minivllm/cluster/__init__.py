"""Several engines that serve one queue, and who of them gets which request."""
