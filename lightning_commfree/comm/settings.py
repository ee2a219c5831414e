"""Validation helpers for the settings of all algorithms."""

from __future__ import annotations

from collections.abc import Collection


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise a `ValueError` that names the setting `name` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{name}={value!r}` is not valid. Choose one of {', '.join(map(repr, choices))}."
        )


def check_count(name: str, value: object, least: int, meaning: str = "") -> None:
    """Raise a TypeError or ValueError unless `value` is an int of at least `least`.

    If the value is too small, `meaning` is appended to the error message.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"`{name}={value!r}` must be an integer, but it is a {type(value).__name__}. Pass an"
            " int."
        )
    if value < least:
        raise ValueError(f"`{name}={value}` must be at least {least}{meaning}.")
