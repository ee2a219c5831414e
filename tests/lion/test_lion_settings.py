"""What may be said about the vote, and the sentence for what may not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_commfree.lion import LionSettings


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"vote": "mean"},
            ValueError,
            r"`vote='mean'` is not valid. Choose one of 'majority', 'average'",
        ),
        (
            {"ties": "alternate"},
            ValueError,
            r"`ties='alternate'` is not valid. Choose one of 'zero', 'random'",
        ),
        (
            {"nonfinite": "skip"},
            ValueError,
            r"`nonfinite='skip'` is not valid. Choose one of 'raise', 'abstain'",
        ),
        ({"check_drift_every": -5}, ValueError, r"at least 0, where 0 means never"),
        ({"node_size": 0}, ValueError, r"`node_size=0` must be at least 1\.$"),
        ({"node_size": True}, TypeError, r"`node_size=True` must be an integer.* is a bool"),
        (
            {"vote": "average", "ties": "random"},
            ValueError,
            r"`ties='random'` has no effect with `vote='average'`",
        ),
    ],
)
def test_a_wrong_value_is_refused(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LionSettings(**arguments)


def test_the_defaults_are_the_papers() -> None:
    plain = LionSettings()
    assert (plain.vote, plain.ties) == ("majority", "zero")
    assert (plain.nonfinite, plain.node_size, plain.check_drift_every) == ("raise", 1, 100)


def test_facts_tell_any_two_settings_apart() -> None:
    """They are what ranks compare: a knob left out would let ranks part."""
    plain = LionSettings()
    others: dict[str, Any] = {
        "vote": "average",
        "ties": "random",
        "nonfinite": "abstain",
        "node_size": 2,
        "inside": "fsdp",
        "check_drift_every": 7,
    }
    assert others.keys() == {field.name for field in dataclasses.fields(LionSettings)}
    for name, value in others.items():
        fingerprint = LionSettings(**{name: value}).fingerprint()
        assert {key for key in fingerprint if fingerprint[key] != plain.fingerprint()[key]} == {
            name
        }
        assert all(isinstance(text, str) for text in fingerprint.values())
