"""Reads the bodies of requests: small ones at once, large ones beside the event loop."""
