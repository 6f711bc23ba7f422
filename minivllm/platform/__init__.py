"""What both halves stand on: threads, files from outside, child processes, and progress bars."""
