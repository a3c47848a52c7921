"""A driver of Ray on a cluster of this machine: makes videos of prompts, and kills a worker meanwhile.

Its arguments are the artifact, the folder of the videos, a file, and the numbers of prompts and workers. The
file gets the rows that came, the workers that were killed, the seconds that it took, the rows of a second
pass as pandas reads its table, and how many files that has:

    PYTHONPATH=build:runtime:tests python -m helpers.ray_job ARTIFACT VIDEOS told.json 40 4
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pandas
import ray
from ray.util.annotations import RayDeprecationWarning

from wanfleet.ray import make_videos


def actors() -> list[int]:
    """The processes that make videos."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and b"ray::MapWorker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def main() -> None:
    artifact, videos, told = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    prompts, workers, started = int(sys.argv[4]), int(sys.argv[5]), time.monotonic()
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    warnings.simplefilter("error", RayDeprecationWarning)
    rows = [
        {"id": number, "prompt": f"cat {number}", "num_steps": 1, "size": None if number else "1x1"}
        for number in range(prompts)
    ]
    dataset = make_videos(
        ray.data.from_items(rows),
        artifact,
        videos,
        workers=workers,
        suffix=".npy",
        num_cpus=1,
        actor={"memory": 2**20},
    )
    killed = list[int]()

    def kill() -> None:
        while len(list(videos.glob("*.npy"))) < workers:
            time.sleep(0.02)
        killed.extend(actors()[:1])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    made = dataset.take_all()
    seconds = time.monotonic() - started
    table = told.with_name("table")
    dataset.write_parquet(str(table))
    second, files = pandas.read_parquet(table), len(list(table.iterdir()))
    again = json.loads(second.to_json(orient="records"))
    told.write_text(
        json.dumps({"killed": killed, "rows": made, "seconds": seconds, "again": again, "files": files})
    )


if __name__ == "__main__":
    main()
