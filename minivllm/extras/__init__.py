"""Optional features of the engine, which assembly hands in; the engine never imports them."""
