"""What a server writes about its requests, and where."""
