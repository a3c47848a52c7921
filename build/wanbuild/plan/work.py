"""Counts the work of a program: the operations of its matrix products and convolutions, and their bytes.

The function is traced and never compiled, so that a loop's body counts as often as it runs, which XLA's cost
model does not do, and attention counts whatever kernel a target puts in its place. All else of a model
(norms, activations, the solver) is done on values on their way between products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from jax.extend import core

from wanbuild.programs.spec import ProgramSpec

Kind = Literal["matmul", "attention", "convolution"]

PRODUCTS = ("dot_general", "conv_general_dilated")
"""JAX's primitives that matrix units compute."""


class Product(NamedTuple):
    """A kind of matrix product or convolution, by the dtype of its operands.

    ``kind`` is its use: ``attention`` is a product of a kernel in which scores stay on the chip. ``summed``
    is the terms of each sum, and of a convolution the input channels; ``features`` is the columns of the
    result, and of a convolution the output channels.
    """

    kind: Kind
    dtype: str
    summed: int
    features: int


@dataclass
class Work:
    """The work of one call of a program on one device.

    ``flops`` are multiplications and additions by kind of product; ``nbytes`` are bytes of the operands and
    results of products, except those of attention.
    """

    flops: dict[Product, float] = field(default_factory=dict)
    nbytes: float = 0.0

    @property
    def operations(self) -> float:
        """All multiplications and additions, FLOP."""
        return sum(self.flops.values())

    def add(self, other: Work, times: float = 1) -> None:
        """Adds other work, done this many times."""
        for product, flops in other.flops.items():
            self.flops[product] = self.flops.get(product, 0.0) + flops * times
        self.nbytes += other.nbytes * times


def work_of(spec: ProgramSpec) -> Work:
    """Returns the work of a program, which must be for one device."""
    with spec.tracing():
        return _work(jax.make_jaxpr(spec.function)(*spec.arguments).jaxpr, 1)


def _work(jaxpr: core.Jaxpr, trips: int) -> Work:
    """Returns the work of one run of a jaxpr; ``trips``: how often the loop around it runs."""
    work = Work()
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in PRODUCTS]
    # Only scores, their softmax and the weighted sum in a loop are what a kernel does in blocks.
    kernel = len(products) == 2 and any(eqn.primitive.name == "exp" for eqn in jaxpr.eqns)
    for eqn in products:
        product, flops = _product(eqn, kernel)
        nbytes = 0 if kernel else sum(map(_nbytes, (*eqn.invars, *eqn.outvars)))
        work.add(Work({product: flops}, nbytes))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            branches = [branch.jaxpr for branch in eqn.params["branches"]]
            most = max(branches, key=lambda branch: _work(branch, trips).operations)
            work.add(_work(most, trips), min(1.0, (_rows(most) or trips) / trips))
        elif eqn.primitive.name == "while":
            body = eqn.params["body_jaxpr"].jaxpr
            work.add(_work(body, _rows(body) or 1), _rows(body) or 1)
        else:
            count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in _inner(eqn):
                work.add(_work(inner, count), count)
    return work


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the jaxprs that an equation runs."""
    for value in eqn.params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _rows(jaxpr: core.Jaxpr) -> int | None:
    """Returns how often a body runs that takes a row of its arguments at a time: the shortest's rows."""
    # This is how often a branch for only some layers runs, and a loop that may end early.
    given = set(jaxpr.invars)
    rows = [
        _array(eqn.invars[0]).shape[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dynamic_slice"
        and eqn.invars[0] in given
        and eqn.params["slice_sizes"][0] == 1
    ]
    return min(rows, default=None)


def _product(eqn: core.JaxprEqn, kernel: bool) -> tuple[Product, int]:
    """Returns the kind of a product, and its operations."""
    a, b = map(_array, eqn.invars)
    out = math.prod(_array(eqn.outvars[0]).shape)
    if eqn.primitive.name == "conv_general_dilated":
        features, channels, *spatial = eqn.params["dimension_numbers"].rhs_spec
        taps = math.prod(b.shape[axis] for axis in spatial)
        kind = Product("convolution", str(a.dtype), b.shape[channels], b.shape[features])
        return kind, 2 * out * b.shape[channels] * taps
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    depth = math.prod(a.shape[axis] for axis in summed)
    many = math.prod(a.shape[axis] for axis in batch)
    columns = min(math.prod(x.shape) // (depth * many) for x in (a, b))
    return Product("attention" if kernel else "matmul", str(a.dtype), depth, columns), 2 * out * depth


def _array(var: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a value."""
    return var.aval  # type: ignore[no-any-return]


def _nbytes(var: Any) -> int:
    return math.prod(_array(var).shape) * _array(var).dtype.itemsize
