"""What only a knob brings into the engine; the engine never imports it."""
