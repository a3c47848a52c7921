"""The page in a real browser: Debian's Chromium, driven by Playwright, with axe-core for who cannot see it.

With ``WAN_PAGE_ARTIFACT=artifacts/demo/artifact WAN_PAGE_SHOTS=docs/page`` in the environment they write
the screenshots of docs/serving.md.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from msgspec import structs
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect

from helpers.browser import IN_A_BROWSER, chromium, plays
from helpers.damage import linked
from helpers.living import house_beside
from helpers.manifests import plain_adapter
from serve_client import Server, served
from wanrun.artifact.adapter import SamplingDefaults
from wanrun.artifact.manifest import read_manifest

pytestmark = pytest.mark.slow

SHOTS = os.environ.get("WAN_PAGE_SHOTS")
LONG = "5000"
PROMPT = "a red ball rolls to the right over green ground"
PROMPTS = (
    PROMPT,
    "a big blue star grows on striped grey ground",
    "a yellow square moves down over speckled blue ground",
    "a small green triangle rolls to the left over brown ground",
    "a white ball goes round in a circle over checked black ground",
)
KEY = "a key that is long enough"

pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=20_000)  # of a machine that does other tests too
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_server(
    toy_artifact: Path,
    media_toy: Callable[[str], tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server of a model of text and of one that takes a first image."""
    text = os.environ.get("WAN_PAGE_ARTIFACT", toy_artifact)
    _, image = media_toy("wan2.1-i2v")
    with served(tmp_path_factory.mktemp("page"), f"text={text}", f"image={image}") as server:
        yield server


@pytest.fixture
def page(browser: Browser, page_server: Server) -> Iterator[Page]:
    """The page, in which nothing may go wrong unsaid."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "warning" else None)
    page.goto(page_server.url)
    expect(page.locator("#ready")).to_have_text("Ready")
    yield page
    context.close()
    for job in page_server.call("GET", "/v1/videos?status=queued,in_progress&limit=100").json["data"]:
        page_server.call("DELETE", f"/v1/videos/{job['id']}")
    assert problems == []


def ask(page: Page, prompt: str = PROMPT, steps: str = "2", **fields: str) -> None:
    """Fills in the composer and sends it."""
    page.fill("#prompt", prompt)
    if page.locator("#more").get_attribute("open") is None:
        page.click("#more summary")
    for name, value in {"num_steps": steps, **fields}.items():
        page.fill(f"[name={name}]", value)
    page.click("#submit")


def row(page: Page, prompt: str) -> Any:
    return page.locator("#queue [data-video]").filter(has_text=prompt)


def card(page: Page, prompt: str) -> Any:
    return page.locator("#gallery [data-video]").filter(has_text=prompt)


def prompts(page: Page) -> list[str]:
    return [text.strip() for text in page.locator("#queue .job-prompt").all_inner_texts()]


def check(page: Page, name: str) -> None:
    """Looks at the page as a screen reader does, and keeps a picture of it where that was asked for."""
    found = Axe().run(page)["violations"]
    assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in found] == [], name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    if SHOTS is not None:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def test_a_video_is_made(page: Page) -> None:
    """In windows: submitted, watched, played; its settings are used again; searched for and deleted."""
    windows = {"num_frames": "17", "window_frames": "9"}
    ask(page, steps="30", **windows)
    expect(card(page, PROMPT)).to_have_attribute("data-status", "completed", timeout=30_000)
    card(page, PROMPT).locator("button").click()
    video = page.locator("#viewer video")
    expect(video).to_be_visible()
    assert plays(video)
    expect(page.locator("#facts")).to_contain_text("17 frames")
    seed = int(re.search(r"Seed\s+(\d+)", page.locator("#facts").inner_text())[1])  # type: ignore[index]
    page.click("#viewer [data-action=settings]")
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    expect(page.locator("#seed")).to_have_value(str(seed))
    for name, value in windows.items():
        expect(page.locator(f"[name={name}]")).to_have_value(value)
    expect(page.locator("#shapes input:checked")).to_have_value("96x64/9")
    card(page, PROMPT).first.locator("button").click()
    page.click("#viewer [data-action=again]")
    page.keyboard.press("Escape")
    expect(card(page, PROMPT)).to_have_count(2, timeout=30_000)
    page.fill("#search", "nothing like it")
    expect(page.locator("#gallery-empty-title")).to_have_text("No prompt has these words.")
    page.fill("#search", "red green")
    expect(card(page, PROMPT)).to_have_count(2)
    for left in (1, 0):
        card(page, PROMPT).first.locator("button").click()
        page.click("#viewer [data-action=delete]")
        page.click("[data-action=confirm-delete]")
        expect(card(page, PROMPT)).to_have_count(left)


def test_the_queue(page: Page) -> None:
    """One runs with its steps shown; others are moved, changed and cancelled, by the keyboard alone."""
    for name in ("apple", "pear", "plum"):
        ask(page, f"the {name} of them", LONG)
        expect(row(page, name)).to_be_visible()
    running = row(page, "apple")
    expect(running.locator(".job-state")).to_have_text(re.compile(r"Step \d+ of 5000"), timeout=20_000)
    expect(running.get_by_alt_text("Preview: the apple of them")).to_be_visible()
    assert running.locator("img").evaluate("image => image.naturalWidth") > 0
    expect(row(page, "pear").locator(".job-state")).to_have_text("First in line")
    row(page, "plum").locator("[data-action=up]").focus()
    page.keyboard.press("Enter")
    expect(row(page, "plum").locator(".job-state")).to_have_text("First in line")
    assert [prompt.split()[1] for prompt in prompts(page)] == ["apple", "plum", "pear"]
    page.reload()  # what is shown is what the server has
    expect(row(page, "plum").locator(".job-state")).to_have_text("First in line")
    row(page, "plum").locator("[data-action=change]").press("Enter")
    expect(page.locator("#submit")).to_have_text("Save changes")
    page.fill("#prompt", "the changed one")
    page.locator("#prompt").press("Control+Enter")
    expect(row(page, "changed").locator(".job-state")).to_have_text("First in line")
    expect(page.locator("#submit")).to_have_text("Make video")
    for name in ("changed", "pear", "apple"):
        row(page, name).locator("[data-action=cancel]").press("Enter")
        expect(row(page, name)).to_have_count(0, timeout=10_000)
    expect(card(page, "the apple of them")).to_have_attribute("data-status", "cancelled")
    page.click("#clear-cancelled")
    page.click("[data-action=confirm-delete]")
    expect(page.locator("#gallery [data-status=cancelled]")).to_have_count(0)
    expect(page.locator("#clear-cancelled")).to_be_hidden()
    page.locator("#random").set_checked(False)
    ask(page, "both of them", LONG, seed="3, 1")
    expect(row(page, "both of them")).to_have_count(2)


def test_dragging(page: Page) -> None:
    for name in ("apple", "pear", "plum"):
        ask(page, f"drag the {name}", LONG)
        expect(row(page, name)).to_be_visible()
    expect(row(page, "apple").locator(".job-state")).to_have_text(re.compile("Step"), timeout=20_000)
    above = row(page, "pear").locator(".job-prompt")
    row(page, "plum").locator(".grip").drag_to(above, target_position={"x": 5, "y": 1})
    expect(row(page, "plum").locator(".job-state")).to_have_text("First in line")


def test_errors_are_beside_their_fields(page: Page) -> None:
    windows = {"num_frames": "16", "window_frames": "9"}
    ask(page, "an impossible length", "2", **windows)
    expect(page.locator('[data-error-for="num_frames"]')).to_contain_text("a multiple of 4 more")
    ask(page, "an impossible one", "2", timesteps="3,2,1", **dict.fromkeys(windows, ""))
    expect(page.locator('[data-error-for="num_steps"]')).to_contain_text(
        "Steps and timesteps contradict each other"
    )
    expect(page.locator("[name=num_steps]")).to_be_focused()
    page.fill("[name=num_steps]", "")
    page.fill("[name=timesteps]", "1,2,3")
    page.click("#submit")
    expect(page.locator("#form-error")).to_contain_text("each below the one before")
    expect(page.locator("#prompt")).to_have_value("an impossible one")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("an impossible one")  # what was typed is not lost


def test_a_first_image(page: Page, page_server: Server, tmp_path: Path) -> None:
    """Uploaded with a thumbnail, shown in the queue, and a last frame becomes the next first image."""
    picture = tmp_path / "cat.png"
    Image.new("RGB", (96, 64), (200, 90, 30)).save(picture)
    expect(page.locator("#more")).not_to_have_attribute("open", "")
    page.set_viewport_size({"width": 1280, "height": 500})
    page.click("#more summary")
    expect(page.locator("#more [name]").first).to_be_in_viewport()
    page.set_viewport_size({"width": 1280, "height": 860})
    page.select_option("#model", "image")
    expect(page.locator("#ready")).to_have_text("Loads with its first video")
    assert "Animate" not in page.locator("#composer").inner_text()
    choices = [one.get_attribute("value") for one in page.locator("[name=loop] option").all()]
    assert choices in ([], ["", "step", "scan"])  # as they are built
    page.fill("#prompt", "from an image")
    page.click("#submit")
    expect(page.locator('[data-error-for="image"]')).to_be_visible()
    page.set_input_files('[data-input="image"] input[type=file]', picture)
    expect(page.locator('[data-input="image"] img')).to_be_visible()
    ask(page, "from an image", LONG)
    expect(row(page, "from an image").locator("img")).to_be_visible()
    check(page, "image")
    row(page, "from an image").locator("[data-action=cancel]").click()
    expect(row(page, "from an image")).to_have_count(0, timeout=10_000)
    ask(page, "the second part", "1")
    expect(card(page, "the second part")).to_have_attribute("data-status", "completed", timeout=30_000)
    expect(page.locator("#ready")).to_have_text("Ready")
    card(page, "the second part").locator("button").click()
    page.click("#viewer [data-action=last-frame]")
    expect(page.locator("#viewer")).to_be_hidden()  # the frame has come, and the focus goes nowhere any more
    expect(page.locator('[data-input="image"] img')).to_be_visible()
    ask(page, "the third part", "1")
    expect(card(page, "the third part")).to_have_attribute("data-status", "completed", timeout=30_000)
    (job,) = page_server.call("GET", "/v1/videos?q=third+part").json["data"]
    sent = page_server.call("GET", f"/v1/videos/{job['id']}/media/image/0").body
    (before,) = page_server.call("GET", "/v1/videos?q=second+part").json["data"]
    assert sent == page_server.call("GET", f"/v1/videos/{before['id']}/content?variant=last_frame").body


def test_loras(browser: Browser, toy_artifact: Path, tmp_path: Path) -> None:
    """Chosen in a list with sliders, sent, told of, and used again; by the keyboard too."""
    folder = linked(toy_artifact, tmp_path / "toy")
    manifest = read_manifest(folder)
    slots = {
        name: structs.replace(one, options=structs.replace(one.options, lora_rank=16))
        for name, one in manifest.profiles.items()
    }
    fast = plain_adapter("fast", variant=manifest.model.variant, options=SamplingDefaults(num_steps=1))
    style = plain_adapter("style", variant=manifest.model.variant)
    manifest.changed(profiles=slots, adapters={"style": style, "fast": fast}).write(folder)
    with served(tmp_path / "data", f"toy={folder}") as server:
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#ready")).to_have_text("Ready")
        told = [text.split("\n\n") for text in page.locator("[data-lora]").all_inner_texts()]
        assert [name for name, _ in told] == ["fast", "style"] and "Steps 1" in told[0][1]
        expect(page.get_by_label("Strength of style")).to_be_hidden()
        page.get_by_label("style", exact=True).focus()
        page.keyboard.press("Space")
        slider = page.get_by_label("Strength of style")
        expect(slider).to_have_value("1")
        slider.focus()
        for _ in range(10):
            page.keyboard.press("ArrowLeft")
        expect(page.locator("[data-lora=style] .strength-value")).to_have_text("0.5")
        page.get_by_label("fast", exact=True).check()
        check(page, "loras")
        page.reload()  # what was chosen is not lost
        expect(slider).to_have_value("0.5")
        ask(page, "with a style", "2")
        expect(card(page, "with a style")).to_have_count(1, timeout=30_000)
        (job,) = server.call("GET", "/v1/videos?q=style").json["data"]
        chosen = [{"name": "fast", "strength": 1}, {"name": "style", "strength": 0.5}]
        assert job["options"]["lora"] == chosen
        page.get_by_label("style", exact=True).uncheck()
        card(page, "with a style").locator("button").click()
        expect(page.locator("#facts")).to_contain_text("fast 1, style 0.5")
        page.click("#viewer [data-action=settings]")
        expect(page.get_by_label("style", exact=True)).to_be_checked()
        expect(slider).to_have_value("0.5")
        context.close()
        page = browser.new_context().new_page()  # a model of two experts, whose shape has no slots for some

        def two_experts(route: Route) -> None:
            (model,) = (body := route.fetch().json())["data"]
            model["loras"][0]["experts"] = ["low"]
            model["loras"][1]["experts"] = ["high", "low"]
            model["build_limit"] = 10**6
            route.fulfill(json=body)

        page.route("**/v1/models", two_experts)
        page.goto(server.url)
        page.get_by_label("style", exact=True).check()
        expect(page.locator("[data-lora=fast] .help")).to_contain_text("Low noise alone")
        page.get_by_label("Low noise of style").fill("-0.25")
        page.get_by_label("Another shape").check()
        ask(page, "of two", "2")
        expect(page.locator("#size-error")).to_contain_text("832x480")
        page.fill("#other-size", "128x96")
        page.fill("#other-frames", "5")
        with page.expect_request("**/v1/videos") as sent:
            ask(page, "of two", "2")
        assert {"128x96", "5"} <= set((sent.value.post_data or "").split())
        assert '[{"name":"style","high":1,"low":-0.25}]' in (sent.value.post_data or "")
        expect(page.locator('[data-error-for="lora"]')).to_contain_text("give one strength")
        page.context.close()


def test_live(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by Media Source Extensions after a broken connection, steered, loaded again, and seen whole."""
    with house_beside(tmp_path, monkeypatch) as there:
        (page := browser.new_page()).route("**/live?*", lambda route: route.abort(), times=1)
        page.goto(f"http://localhost:{there.port}")
        expect(page.get_by_label("Live", exact=True)).to_be_checked()
        ask(page)
        expect(page.locator("#live-title")).to_have_text("Live")
        page.fill("#next-prompt", PROMPTS[1])
        page.keyboard.press("Enter")
        expect(page.locator("#live-prompt")).to_have_text(PROMPTS[1])
        assert Axe().run(page)["violations"] == []
        page.reload()
        expect(page.locator("#live-title")).to_have_text("Live")
        expect(page.locator("#live-prompt")).to_have_text(PROMPTS[1])
        expect(page.locator("#live-first")).to_contain_text("after")
        page.fill("#next-prompt", PROMPTS[0])
        page.click("#steering [type=submit]")
        expect(page.locator("#live-prompt")).to_have_text(PROMPTS[0])
        page.click("#live [data-action=close]")
        page.reload()
        expect(page.locator("#live")).to_be_hidden()
        expect(page.locator("#queue .job-shape")).to_contain_text(" s")
        page.click("#queue [data-action=watch]")
        page.click("#live-stop")
        expect(page.locator("#live-title")).to_have_text("It was stopped")
        page.click("#live-whole")
        assert plays(page.locator("#viewer video"))


@pytest.mark.thorough
def test_every_state_looks_well(browser: Browser, toy_artifact: Path, tmp_path: Path) -> None:
    """Idle, running, done, an error, a phone, dark: by axe-core, and as the pictures of docs/serving.md."""
    artifact, steps, long = os.environ.get("WAN_PAGE_ARTIFACT"), "30", "400"
    if artifact is None:
        artifact, steps, long = str(toy_artifact), "2", LONG
    with served(tmp_path / "data", f"demo={artifact}") as server:
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#ready")).to_have_text("Ready")
        expect(page.locator("#gallery-empty")).to_be_visible()
        check(page, "idle")
        for prompt in PROMPTS[:3]:
            ask(page, prompt, steps)
        for prompt in PROMPTS[:3]:
            expect(card(page, prompt)).to_have_attribute("data-status", "completed", timeout=30_000)
        for prompt in PROMPTS[3:]:
            ask(page, prompt, long)
            expect(row(page, prompt)).to_be_visible()
        expect(row(page, PROMPTS[3]).locator(".job-state")).to_have_text(
            re.compile(r"Step \d"), timeout=20_000
        )
        expect(row(page, PROMPTS[3]).get_by_alt_text(re.compile("Preview"))).to_be_visible()
        page.click("#more summary")
        check(page, "running")
        for name, width, scheme in (("dark", 1280, "dark"), ("phone", 390, "light")):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.set_viewport_size({"width": width, "height": 860})
            page.locator("#queue-title").evaluate("title => title.scrollIntoView()")
            check(page, name)
        page.set_viewport_size({"width": 1280, "height": 860})
        card(page, PROMPTS[0]).locator("button").click()
        expect(page.locator("#viewer video")).to_be_visible()
        page.wait_for_timeout(600)
        check(page, "done")
        page.keyboard.press("Escape")
        ask(page, PROMPTS[0], "2", timesteps="3,2,1")
        expect(page.locator('[data-error-for="num_steps"]')).to_be_visible()
        check(page, "error")
        context.close()


@pytest.mark.thorough
def test_a_restart_while_it_is_open(browser: Browser, toy_artifact: Path, tmp_path: Path) -> None:
    """The page says that the connection is lost, finds the server again, and its job goes on; with keys."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY.replace(' ', '-')}\n")
    keys.chmod(0o600)
    server = Server(tmp_path / "data", f"toy={toy_artifact}", "--keys", keys)
    server.ready()
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.fill("#key", "a wrong key")
    page.click("#key-submit")
    expect(page.locator("#key-error")).to_have_text("This key is wrong.")
    page.fill("#key", KEY.replace(" ", "-"))
    page.click("#key-submit")
    expect(page.locator("#ready")).to_have_text("Ready")
    ask(page, "it goes on", "500")
    expect(row(page, "it goes on").locator(".job-state")).to_have_text(re.compile("Step"), timeout=20_000)
    server.end(signal.SIGKILL)
    expect(page.locator("#connection")).to_be_visible(timeout=20_000)
    with served(tmp_path / "data", f"toy={toy_artifact}", "--keys", keys, "--port", server.port):
        expect(page.locator("#connection")).to_be_hidden(timeout=30_000)
        expect(card(page, "it goes on")).to_have_attribute("data-status", "completed", timeout=60_000)
        context.close()
