"""Threads, files, processes, option classes and progress bars, which every room uses."""
