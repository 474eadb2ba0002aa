"""One file a peer."""
