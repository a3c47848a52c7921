"""What is kept of the last inputs: found by the same object and programs alone, and no reason to live."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from wanrun.generation.last_encoded import Encoded, LastEncoded
from wanrun.media.types import Inputs

PROGRAMS = ("image", "video")


def test_the_key_is_the_object_and_the_programs() -> None:
    last, inputs, encoded = LastEncoded(), Inputs({"image": np.zeros(3)}), Encoded({}, {"condition": 1})
    assert last.find(inputs, PROGRAMS) is None
    last.keep(inputs, PROGRAMS, encoded)
    assert last.find(inputs, list(PROGRAMS)) is encoded
    assert last.find(Inputs(inputs.arrays), PROGRAMS) is None  # equal, and another
    assert last.find(inputs, ("image", "other")) is None
    last.forget()
    assert last.find(inputs, PROGRAMS) is None


def test_one_entry() -> None:
    last, first, second = LastEncoded(), Inputs(), Inputs()
    last.keep(first, PROGRAMS, Encoded({}, {"condition": 1}))
    last.keep(second, PROGRAMS, {"condition": 2})
    assert last.find(first, PROGRAMS) is None
    assert last.find(second, PROGRAMS) == {"condition": 2}


def test_inputs_are_not_kept_alive() -> None:
    last, inputs = LastEncoded(), Inputs()
    last.keep(inputs, PROGRAMS, {})
    gone = weakref.ref(inputs)
    del inputs
    gc.collect()
    assert gone() is None
    assert last.find(Inputs(), PROGRAMS) is None
