"""The paths of the API, one file for each kind, and what an answer is made of."""
