"""How one measurement is made."""
