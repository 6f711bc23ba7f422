"""Servers of other engines that are started here: their command lines, their metrics, their end."""
