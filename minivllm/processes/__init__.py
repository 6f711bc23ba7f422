"""An engine in another process: its protocol, where it lies, who gets which request."""
