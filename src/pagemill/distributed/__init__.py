"""Several engines behind one front end: which request goes where, on Ray Serve."""
