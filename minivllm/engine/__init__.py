"""The core that every request passes through."""
