"""One table of published models on chips: whether they fit, on which mesh, and predicted times.

By formula, in seconds. Prints a table in Markdown and, at the end, one line of JSON.

    python benchmarks/plan_table.py
    python benchmarks/plan_table.py --model wan2.1-t2v-14b --target v5p-8
"""

from __future__ import annotations

import argparse
import itertools
import json

from wanbuild.build_options import PlanRequest
from wanbuild.conversion.chosen import parse_quantise
from wanbuild.plan.plan import Plan, make_plan
from wanbuild.plan.plan_report import as_json, start_seconds
from wanbuild.plan.subject import Subject, read_subject
from wanrun import EIGHT_BITS
from wanrun.artifact.mesh import mesh_text
from wanrun.errors import UsageError
from wanrun.units import in_bytes

MODELS = {
    "wan2.1-t2v-1.3b": ((832, 480),),
    "wan2.2-ti2v-5b": ((1280, 704),),
    "wan2.1-t2v-14b": ((832, 480), (1280, 720)),
    "wan2.2-t2v-a14b": ((832, 480), (1280, 720)),
}
"""Sizes in pixels; frames and steps are the published ones."""

TARGETS = ("v5e-8", "v5p-8", "v6e-8", "v7x-8", "h100", "h200", "b200", "rtx4090")

COLUMNS = ("model", "disk", "size", "chip", "mesh", "GB of usable", "held", "a step", "a video", "start")


def row(plan: Plan) -> list[str]:
    """Returns the cells of a plan, without model, disk, size and chip."""
    chosen, need = plan.chosen, plan.chosen.need
    return [
        f"`{mesh_text(chosen.sizes)}`" if chosen.sizes else "one",
        f"{need.total / 1e9:.1f} of {need.limit / 1e9:.1f}",
        need.held,
        f"{chosen.step:.3g} s",
        f"{chosen.video:.0f} s",
        f"{start_seconds(plan):.1f} s",
    ]


def disk_of(subject: Subject) -> str:
    """Returns the size of a model's weights."""
    return in_bytes(sum(component.nbytes for component in subject.manifest.components.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable")
    parser.add_argument("--target", action="append", help="a chip and a number of devices; repeatable")
    parser.add_argument(
        "--quantise", choices=[one.name for one in EIGHT_BITS.values()], help="weights of 8 bits"
    )
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    plans = []
    for model in options.model or MODELS:
        subject = read_subject(model, parse_quantise(options.quantise, ()))
        for size, target in itertools.product(MODELS[model], options.target or TARGETS):
            request = PlanRequest(target, {"sizes": size})
            first = f"| {model} | {disk_of(subject)} | {size[0]}x{size[1]} | {target} |"
            try:
                plan = make_plan(subject, request)
            except UsageError as error:
                print(f"{first} {error} | | | | | |", flush=True)
                plans.append({"model": model, "chip": target, "refused": str(error)})
                continue
            print(f"{first} {' | '.join(row(plan))} |", flush=True)
            plans.append(as_json(plan))
    print(json.dumps(plans))


if __name__ == "__main__":
    main()
