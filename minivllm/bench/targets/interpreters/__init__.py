"""How is an engine driven that needs a Python interpreter of its own?"""
