"""Quantisation: one method a file behind one protocol."""
