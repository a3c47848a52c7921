"""Publishing on a hub, and fetching from it: what is sent, what is kept, and what a cut connection leaves."""

from __future__ import annotations

import json
import os
import random
import tarfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.damage import linked, own
from helpers.elsewhere import TARGET
from helpers.hub_server import read_folder
from helpers.hub_uploads import UploadHub
from helpers.refusals import check_refusal
from wanbuild.cli import wanbuild
from wanbuild.share.card import BEGIN, END
from wanbuild.share.pull import pull
from wanbuild.share.push import push
from wanbuild.share.share_options import PullRequest, PushRequest
from wancli.run import wanrun
from wanhub.marker import MARKER
from wanhub.pins import lock_file, read_pins
from wanhub.signature import SIGNATURE
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError, UsageError, WanError
from wanrun.files import user_cache

NAME = "me/wan"
ELSEWHERE = "-elsewhere-"
"""In the names of the second target's executables."""
OURS = {"README.md", ".gitattributes"}

# huggingface_hub passes what httpx wants otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def quiet(line: str) -> None:
    pass


def run(*arguments: object) -> str:
    """What a command prints; it must succeed."""
    result = CliRunner().invoke(wanbuild, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def pushed(hub: UploadHub, two_targets: Path) -> UploadHub:
    """The hub with the artifact of two targets, pushed; calls are counted from here."""
    push(PushRequest(two_targets, NAME), quiet)
    hub.forget()
    hub.calls.clear()
    hub.received = 0
    return hub


@pytest.mark.slow
def test_what_is_pushed_and_pulled_is_the_artifact(hub: UploadHub, two_targets: Path, tmp_path: Path) -> None:
    printed = run("push", two_targets, NAME, "--private", "--licence", "apache-2.0")
    assert f"pushed hf://{NAME}@{hub.head(NAME)}" in printed and hub.private == {NAME}
    assert {name: data for name, data in hub.files(NAME).items() if name not in OURS} == read_folder(
        two_targets
    )
    counts = Counter(hub.calls)
    assert counts["commit"] == 1 and counts["create"] == 1 and hub.calls[-1] == "commit"
    assert counts["upload"] >= len(hub.objects) == len(set(hub.puts))
    hub.forget()
    printed = run("pull", f"hf://{NAME}", "-o", tmp_path / "pulled", "--all-targets")
    assert read_folder(tmp_path / "pulled") == read_folder(two_targets)
    assert f"targets: cpu, {TARGET}" in printed
    metadata = {name for name in read_folder(two_targets) if name.endswith(("zarr.json", "_METADATA"))}
    assert not metadata & hub.names  # what follows from the manifest is not fetched
    run("verify", tmp_path / "pulled")


@pytest.mark.slow
def test_a_second_push_sends_what_is_new(pushed: UploadHub, two_targets: Path, tmp_path: Path) -> None:
    before = pushed.head(NAME)
    push(PushRequest(two_targets, NAME), quiet)
    assert pushed.received == 0 and "commit" not in pushed.calls and pushed.head(NAME) == before
    changed = linked(two_targets, tmp_path / "changed")
    own(changed, "tokenizer")
    manifest = read_manifest(changed)
    manifest.changed(tool={**manifest.tool, "version": "9"}).write(changed)
    push(PushRequest(changed, NAME), quiet)
    assert pushed.received == 0 and pushed.calls[-1] == "commit"  # manifest and card alone
    assert json.loads(pushed.files(NAME)["manifest.json"])["tool"]["version"] == "9"


@pytest.mark.slow
def test_one_target_travels(pushed: UploadHub, two_targets: Path, tmp_path: Path) -> None:
    printed = run("pull", f"hf://{NAME}", "-o", tmp_path / "one")
    assert printed.splitlines()[-2].endswith("targets: cpu")
    manifest = read_manifest(two_targets)
    assert read_manifest(tmp_path / "one") == manifest  # also the other target, which can still come
    assert not any(ELSEWHERE in name for name in pushed.names)
    nbytes, requests = sum(map(len, read_folder(tmp_path / "one").values())), len(pushed.requests)
    run("pull", f"hf://{NAME}", "-o", tmp_path / "all", "--all-targets")
    assert nbytes < sum(map(len, read_folder(tmp_path / "all").values()))
    assert requests < len(pushed.requests) - requests
    run("pull", f"hf://{NAME}", "-o", tmp_path / "all", "--target", "cpu")
    refused("unknown_name", "pull", f"hf://{NAME}", "-o", tmp_path / "all", "--target", "typo", what="typo")
    assert MARKER in {path.name for path in (tmp_path / "one").iterdir()}
    assert MARKER not in {path.name for path in (tmp_path / "all").iterdir()}  # it stays whole
    result = CliRunner().invoke(wanrun, [str(tmp_path / "one"), "--list", "--explain"])
    assert "cpu: taken" in result.output and f"{TARGET}: " in result.output
    run("push", two_targets, "me/one", "--target", "cpu")
    files = pushed.files("me/one")
    assert list(json.loads(files["manifest.json"])["targets"]) == ["cpu"]
    assert not any(ELSEWHERE in name for name in files)


@pytest.mark.thorough
def test_a_push_cut_off_at_any_moment_leaves_the_old_revision(
    pushed: UploadHub, two_targets: Path, tmp_path: Path
) -> None:
    """At twenty random moments; what came is kept, and a whole push ends it."""
    changed = linked(two_targets, tmp_path / "changed")
    manifest = read_manifest(changed)
    for folder in ("golden", "executables"):
        own(changed, folder)
    manifest.changed(tool={**manifest.tool, "version": "9"}, golden={}).write(changed)
    pushed.objects.clear()  # all content has to come again
    old, before, moments = pushed.files(NAME), pushed.head(NAME), random.Random(38)
    total = sum(path.stat().st_size for path in changed.rglob("*") if path.is_file())
    kept = [0]
    for _ in range(20):
        pushed.cut_after = moments.randrange(total // 4)
        try:
            push(PushRequest(changed, NAME), quiet)
        except WanError as error:
            assert isinstance(error, SourceError) and "was not written" in str(error), error
        assert pushed.head(NAME) == before and pushed.files(NAME) == old
        kept.append(pushed.received)
    assert kept == sorted(kept) and kept[-1] > 0
    pushed.cut_after, there = None, set(pushed.objects)
    pushed.puts.clear()
    push(PushRequest(changed, NAME), quiet)
    assert there and not there & set(pushed.puts)  # nothing came again
    assert json.loads(pushed.files(NAME)["manifest.json"])["golden"] == {}
    assert not any(name.startswith("golden/") for name in pushed.files(NAME))


@pytest.mark.slow
def test_two_pushes_at_once_end_in_one_of_the_two(
    pushed: UploadHub, two_targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    both = threading.Barrier(2)
    own_commit = HfApi.create_commit

    def together(self: HfApi, *arguments: Any, **options: Any) -> Any:
        both.wait(20)
        return own_commit(self, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", together)
    artifacts, ended = [], dict[int, str]()
    for number in range(2):
        artifact = linked(two_targets, tmp_path / str(number))
        manifest = read_manifest(artifact)
        manifest.changed(tool={**manifest.tool, "version": str(number)}).write(artifact)
        artifacts.append(artifact)

    def one(number: int) -> None:
        try:
            ended[number] = push(PushRequest(artifacts[number], NAME), quiet)
        except UsageError as error:
            ended[number] = str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (won,) = [number for number, said in ended.items() if said == f"hf://{NAME}@{pushed.head(NAME)}"]
    assert ended[1 - won].startswith(f"somebody else has pushed to {NAME} meanwhile; push again")
    assert pushed.files(NAME)["manifest.json"] == (artifacts[won] / "manifest.json").read_bytes()


@pytest.mark.slow
def test_the_card_says_what_the_manifest_does(
    pushed: UploadHub, two_targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = pushed.files(NAME)["README.md"].decode()
    manifest = read_manifest(two_targets)
    head = json.loads(card.split("---")[1])
    assert head == {"library_name": "wanrun", "pipeline_tag": "text-to-video", "tags": head["tags"]}
    for said in (
        manifest.content_digest,
        manifest.manifest_digest,
        f"wanrun hf://{NAME}",
        "96x64, 9 frames",
        TARGET,
    ):
        assert said in card
    assert "latents within" in card and "CPU v9" in card and "GFLOP" in card
    # The owner's words stay, and ours are written again.
    files = pushed.files(NAME)
    pushed.repositories[NAME].commit({**files, "README.md": f"mine\n{BEGIN}old{END}\nalso mine".encode()})
    video = tmp_path / "v.gif"
    options = ["--prompt", "a | <b>", "--steps", "1", "-o", str(video)]
    assert CliRunner().invoke(wanrun, [str(two_targets), *options]).exit_code == 0
    run("push", two_targets, NAME, "--example", video)
    card = pushed.files(NAME)["README.md"].decode()
    assert card.startswith(f"mine\n{BEGIN}\n# wan") and card.endswith(f"{END}\nalso mine")
    assert "](example.gif)" in card and "\\| &lt;b>" in card and "seed 0," in card
    assert pushed.files(NAME)["example.gif"] == video.read_bytes()
    pushed.repositories[NAME].commit({**files, "README.md": b"all mine"})
    assert "README.md" in run("push", two_targets, NAME)
    assert pushed.files(NAME)["README.md"] == b"all mine"


@pytest.mark.slow
def test_what_else_a_repository_has_stays(hub: UploadHub, two_targets: Path) -> None:
    """What an earlier push has put there goes if it is no longer of the artifact."""
    mine = {
        "LICENCE": b"mine",
        "tokenizer/vocab.json": b"{}",
        "weights/a": b"a",
        "programs/mine": b"",
    }
    push(PushRequest(two_targets, NAME), quiet)
    repository = hub.repositories[NAME]
    repository.commit({**mine, ".gitattributes": b"*.bin filter=lfs"})
    push(PushRequest(two_targets, NAME), quiet)
    both = hub.files(NAME)
    assert both[".gitattributes"].startswith(b"*.bin filter=lfs\nweights/**/c/** filter=lfs")
    assert any(ELSEWHERE in name for name in both)
    repository.commit({**both, SIGNATURE: b"of the one before"})
    push(PushRequest(two_targets, NAME, ["cpu"]), quiet)
    after = hub.files(NAME)
    assert {name: after[name] for name in mine} == mine and after[".gitattributes"] == both[".gitattributes"]
    assert SIGNATURE not in after and not any(ELSEWHERE in name for name in after)
    repository.commit({**after, "manifest.json": b"{}", "programs/x": b"x"})
    said = list[str]()
    push(PushRequest(two_targets, NAME), said.append)
    assert "manifest.json" in said[-1] and "programs/x" in hub.files(NAME)


@pytest.mark.thorough
def test_a_signature_travels_with_the_whole(
    hub: UploadHub, two_targets: Path, keys: Path, tmp_path: Path
) -> None:
    artifact = linked(two_targets, tmp_path / "signed")
    printed = run("sign", artifact, "--key", keys / "a.pem")
    assert f"for manifest {read_manifest(artifact).manifest_digest}" in printed
    run("push", artifact, NAME)
    run("oci", artifact, "-o", tmp_path / "layout")
    run("oci", artifact, "-o", tmp_path / "layout", "--tag", "one", "--target", "cpu")
    records = [path for path in (tmp_path / "layout").rglob("*") if path.is_file() and _has_signature(path)]
    assert len(records) == 1
    options = ["--prompt", "a", "--steps", "1", "--require-signature", str(keys / "a.pub")]
    result = CliRunner().invoke(wanrun, [f"hf://{NAME}", *options, "-o", str(tmp_path / "a.npy")])
    assert result.exit_code == 0, result.output
    assert SIGNATURE in run("push", artifact, "me/one", "--target", "cpu")
    assert SIGNATURE in hub.files(NAME) and SIGNATURE not in hub.files("me/one")
    result = CliRunner().invoke(wanrun, ["hf://me/one", *options, "-o", str(tmp_path / "b.npy")])
    assert isinstance(result.exception, WanError)
    check_refusal(result.exception, "untrusted", expected=SIGNATURE)
    assert not (tmp_path / "b.npy").exists()


def _has_signature(path: Path) -> bool:
    if not tarfile.is_tarfile(path):
        return False
    with tarfile.open(path) as archive:
        return SIGNATURE in archive.getnames()


def refused(code: ErrorCode, *arguments: object, exit_code: int = 2, **parts: object) -> None:
    """Runs a command that must fail with an error of a code, and values in its parts."""
    result = CliRunner().invoke(wanbuild, [str(one) for one in arguments])
    assert isinstance(result.exception, WanError), result.output
    check_refusal(result.exception, code, **parts)
    assert result.exception.exit_code == exit_code


def test_what_is_refused_sends_nothing(hub: UploadHub, two_targets: Path, tmp_path: Path) -> None:
    refused("unknown_name", "push", two_targets, NAME, "--target", "v5e", what=" v5e", expected="cpu")
    example = ("push", two_targets, NAME, "--example")
    (tmp_path / "v.mp4").write_bytes(b"none")
    refused("unreadable", *example, tmp_path / "v.mp4", what=tmp_path / "v.mp4")
    os.mkfifo(tmp_path / "w.mp4")
    refused("unreadable", *example, tmp_path / "w.mp4", what=tmp_path / "w.mp4", found="not a file")
    refused("wrong_kind", *example, tmp_path, what=tmp_path, expected=".mp4 or ")
    for name in ("wan", "me/wan/x", "me/w an", "me/a--b", f"hf://{NAME}", f"{NAME}@main", "", "-"):
        refused("invalid_value", "push", two_targets, name, expected="OWNER/NAME", found=f'"{name}"')
    for address in ("hf://wan", "hf://me/w an", "ftp://host/wan", "me/wan"):
        refused("invalid_value", "pull", address, what=address, expected="://")
    assert hub.repositories == {} and not hub.calls
    hub.shutdown()
    hub.server_close()
    refused("unreachable", "push", two_targets, NAME, exit_code=1, what=f"hf://{NAME}")
    refused("unreachable", "pull", f"hf://{NAME}", exit_code=1)
    refused("unreachable", "convert", NAME, "--artifact", tmp_path / "artifact", exit_code=1)


@pytest.mark.slow
def test_a_pull_goes_on_and_spares_what_is_not_its_own(
    pushed: UploadHub, two_targets: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    pulled = ("pull", f"hf://{NAME}")
    refused("exists", *pulled, "-o", tmp_path / "mine", what=tmp_path / "mine")
    other = linked(two_targets, tmp_path / "other")
    manifest = read_manifest(other)
    manifest.changed(tool={"name": "wanbuild", "version": "9"}).write(other)
    refused("exists", *pulled, "-o", other, what=other)
    refused("conflict", *pulled, "--target", "cpu", "--all-targets", what="--target and --all-targets")
    name = manifest.tokenizer.file
    pushed.repositories[NAME].faults[name] = [("damage", 1)]
    refused("damaged", *pulled, "-o", tmp_path / "new", "--all-targets", exit_code=3, what=name)
    lock = lock_file(user_cache() / "artifacts")
    assert read_pins(lock) == {}  # what failed pins nothing
    pushed.forget()
    pull(PullRequest(f"hf://{NAME}", tmp_path / "new", whole=True), quiet)
    assert read_pins(lock).keys() == {f"hf://{NAME}"}
    assert read_folder(tmp_path / "new") == read_folder(two_targets)
    assert len(pushed.requests) < 40 < len(read_folder(two_targets))  # the rest was there
