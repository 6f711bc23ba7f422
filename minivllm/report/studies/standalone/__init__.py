"""Pages of one study by itself: of a record of `task=kernels`, or of two runs beside each other."""
