"""What happens to a running server: signals, new keys, draining, the end."""
