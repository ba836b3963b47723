"""Errors that are meant for people. Every one carries what was given, what is allowed and what to change."""

from __future__ import annotations

USER_ERROR_EXIT_CODE = 2
"""Exit code of any program of ours that ends because of what the user gave it."""


class UserError(Exception):
    """A mistake that the user can correct. Programs print it as one message with a hint, never as a traceback.

    Args:
        message: What is wrong, with the values given and the values allowed.
        hint: What to change or to type next.
        where: File and line the value came from, such as ``space.yaml:12``.
    """

    def __init__(self, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\nhint: {self.hint}" if self.hint else text


class RuleError(UserError):
    """A plan that breaks a legality rule of ``engine.rules``.

    Args:
        rule: Identifier of the first rule that was broken, such as ``tp.divides_heads``.
    """

    def __init__(self, rule: str, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        super().__init__(message, hint=hint, where=where)
        self.rule = rule
