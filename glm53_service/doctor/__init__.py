"""Read-only checks of a node, of two nodes side by side, and the snapshot that a user can send."""
