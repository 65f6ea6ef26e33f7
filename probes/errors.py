"""The errors that a user can meet, each with the exit code that INTERFACE promises for its kind."""

from __future__ import annotations


class GradplanError(Exception):
    """Base of all errors that the command line shows as one message, without a traceback of its own."""

    exit_code = 1


class UserCodeError(GradplanError):
    """The user's model.py failed or does not keep the contract.

    ``details`` is the traceback of the user's own frames, ready to print above the message; empty where the
    message says all.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(GradplanError):
    """A wrong command: a file that is not there, an unknown device, a bad size, a file in the way."""

    exit_code = 2


class DoesNotFitError(GradplanError):
    """Not even the smallest micro-batch fits; the message says what would make it fit."""

    exit_code = 3
