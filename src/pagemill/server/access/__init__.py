"""Who may ask a server, from where, how much and how often; decided before a body is read."""
