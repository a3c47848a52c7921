"""The routes of a live video as the page asks them, answered without a model."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from playwright.sync_api import Page, Route

from wanrun.media.ffmpeg import find_ffmpeg


class LiveRoutes:
    """A live video of four parts of twelve frames; a reader's connection breaks after the first two.

    Args:
        page: whose requests are answered from now on; its first model makes live videos.
        prompt: the video's first one.

    Attributes:
        sent: the bodies of requests that make and steer it.
    """

    def __init__(self, page: Page, prompt: str) -> None:
        self.sent: list[Any] = []
        self._head, *parts = _fragments()
        self._parts = [parts[:2], parts[2:]]
        state = {"status": "in_progress", "phase": "steps", "progress": 0, "preview": None, "media": []}
        shape = {"size": "96x64", "seconds": "0", "fps": 16, "num_videos": 1, "options": {}, "created_at": 0}
        live = {"made": 48, "stopped": None, "prompts": [{"first": 0, "prompt": prompt}]}
        self._video: dict[str, Any] = {"id": "a", "prompt": prompt, **state, **shape, "live": live}
        page.route("**/v1/models", self._models)
        page.route("**/v1/videos", self._create)
        page.route(re.compile("/v1/videos/a"), self._one)
        page.reload()

    def _models(self, route: Route) -> None:
        (body := route.fetch().json())["data"][0]["live"] = True
        route.fulfill(json=body)

    def _create(self, route: Route) -> None:
        self.sent.append(said := route.request.post_data)
        assert said and 'name="live"' in said
        route.fulfill(json=self._video)

    def _one(self, route: Route) -> None:
        request, live = route.request, self._video["live"]
        if request.url.endswith("/live"):
            body = self._head + b"".join(self._parts.pop(0) if self._parts else [])
            return route.fulfill(body=body, content_type='video/mp4; codecs="avc1.64000A"')
        if request.method == "PATCH":
            self.sent.append(said := request.post_data_json)
            live["prompts"].append({"first": 30, **said})
        if request.url.endswith("/cancel"):
            self._video |= {"status": "cancelled", "phase": None}
            live["stopped"] = "client"
        return route.fulfill(json=self._video)


def _fragments() -> list[bytes]:
    flags = "frag_keyframe+empty_moov+default_base_moof"
    source = "-v error -f lavfi -i testsrc2=s=96x64:r=16 -frames:v 48"
    options = f"{source} -c:v libx264 -bf 0 -g 12 -movflags {flags} -f mp4 -"
    file = subprocess.run([find_ffmpeg(), *options.split()], check=True, stdout=subprocess.PIPE)
    return re.split(b"(?s)(?=.{4}moof)", file.stdout.partition(b"mfra")[0][:-4])
