"""An outcome and an event as another process reads them."""

from __future__ import annotations

import pytest
from msgspec import DecodeError

from wanfleet.uploads import StoreError
from wanrun import errors
from wanrun.errors import UsageError, WanError, field
from wanrun.job.outcome import Outcome, from_wire, plain, to_wire
from wanrun.job.progress import Event


def again(record: Event | Outcome) -> Event | Outcome:
    line = to_wire(record)
    assert b"\n" not in line
    found: Event | Outcome = from_wire(line, Event | Outcome)
    return found


def test_an_outcome_and_an_event() -> None:
    outcome = Outcome(id="1", metadata={"a": [1.5, None]}, seconds={"steps": 0.1}, steps=3, warnings=["w"])
    event = Event("1", "steps", 2, 3)
    assert again(outcome) == outcome and again(event) == event
    with pytest.raises(DecodeError):
        from_wire(b"{}", Event | Outcome)


@pytest.mark.parametrize(
    "kind", [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, WanError)]
)
def test_an_error_keeps_its_class_and_its_parts(kind: type[WanError]) -> None:
    error = kind("conflict", f"{field('seed')} is\nwrong", expected=3, found=None, remedy="")
    found = again(Outcome(id="1", error=error))
    assert isinstance(found, Outcome) and type(found.error) is kind
    assert found.error.code == "conflict"
    assert found.error.spelled(str.upper) == error.spelled(str.upper) and found.error.fields == ("seed",)


def test_errors_of_other_classes() -> None:
    """One of another package is itself where it is imported; else, or made otherwise, of the class above."""

    class OddError(UsageError):
        def __init__(self) -> None:
            super().__init__("busy", "odd")

    for error, kind in ((StoreError("unreachable", "full"), StoreError), (OddError(), UsageError)):
        found = again(Outcome(id="1", error=error))
        assert isinstance(found, Outcome) and type(found.error) is kind and str(found.error) == str(error)
    line = to_wire(Outcome(id="1", error=StoreError("unreachable", "full"))).replace(
        b"StoreError", b"UnknownError"
    )
    assert type(from_wire(line, Outcome).error) is UsageError
    with pytest.raises(NotImplementedError):
        to_wire(object())


def test_metadata_as_json_holds_it() -> None:
    half = "a byte that is no UTF-8: \udcff"
    assert plain({"a": (1, 2), "b": ValueError("x"), "c": half}) == {"a": [1, 2], "b": "x", "c": half}
