"""Codes in a decode state: `Finish`, why a request ended, and `Origin`, where a token came from."""

__all__ = ["Finish", "Origin"]


class Finish:
    """Reasons for which a request ended; 0 while it goes on."""

    LENGTH = 1
    END_OF_SEQUENCE = 2
    INVALID = 3


class Origin:
    """Origins of a token; 0 is the prompt."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
