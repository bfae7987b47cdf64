"""Answers of a model that says what a test wants it to."""

from pagemill.frontend import request_state

END = "§"
"""What follows every such answer: a stop string."""


def say(monkeypatch, text, size=5):
    """Makes all answers this text, so many characters a token."""

    class Script:
        def __init__(self, *_, **__):
            self.left = text + END

        def add(self, token_ids):
            piece, self.left = self.left[:size], self.left[size:]
            return piece

        def finish(self):
            return ""

    monkeypatch.setattr(request_state, "Detokenizer", Script)
