"""Ablations: their designs, and what each optimisation is worth."""
