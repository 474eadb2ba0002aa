"""Nothing of its own."""
