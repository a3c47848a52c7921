"""The training of the tiny checkpoints: what it does in another way than the reference is equal to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from tinywan.captions import caption
from tinywan.checkpoint import FOLDER
from tinywan.endless import BLOCK, random_story
from tinywan.learning import (
    adapter,
    autoencoder,
    causal,
    course,
    export,
    flow,
    latents,
    live,
    log,
    models,
    muon,
    optimizer,
    state,
    student,
    text,
)
from tinywan.learning.course import Plan
from tinywan.learning.stories import CHANGES, Stories
from tinywan.scenes import random_scene
from tokenizers import Tokenizer
from transformers import UMT5EncoderModel

from wanbuild.lora.merge import LoraRequest, open_loras


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    models.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def captions(tokenizer: Path) -> text.Captions:
    torch.manual_seed(1)
    return text.Captions(tokenizer, models.text_encoder(tokenizer)).eval()


def test_every_word_of_a_caption_has_a_piece(tokenizer: Path) -> None:
    read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rng = np.random.default_rng(0)
    for _ in range(300):
        words = caption(random_scene(rng), rng).lower().rstrip(".")
        pieces = read.encode(words).tokens
        assert len(pieces) <= len(words.split()) + words.count(",") + 1


def test_captions_leave_room_for_padding(captions: text.Captions) -> None:
    rng = np.random.default_rng(0)
    some = [caption(random_scene(rng, most_things=2), rng) for _ in range(300)]
    with torch.no_grad():
        embedded = captions(some)
    assert embedded.shape == (300, text.TOKENS, models.TEXT_WIDTH)
    assert not embedded[:, -1].any()
    assert embedded[:, 0].any(-1).all()


def test_a_caption_that_is_too_long_is_refused(captions: text.Captions) -> None:
    with pytest.raises(ValueError, match=r"41 .* 32"):
        captions(["red " * 40])


@pytest.mark.parametrize("image", [False, True])
def test_attention_to_few_tokens_is_attention_to_512(image: bool, captions: text.Captions) -> None:
    torch.manual_seed(2)
    model = models.transformer(image).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        given = torch.randn(2, 36 if image else 16, 3, 6, 10)
        sigmas = torch.tensor([300.0, 700.0])
        few = captions(["a red ball moves up over green ground", ""])
        all_tokens = torch.cat([few, few.new_zeros(2, text.PADDED_TOKENS - text.TOKENS, few.shape[2])], 1)
        pictures = torch.randn(2, 17, models.IMAGE_WIDTH) if image else None
        expected = model(given, sigmas, all_tokens, pictures, return_dict=False)[0]
        text.shorten(model)
        found = model(given, sigmas, few, pictures, return_dict=False)[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6


@pytest.mark.parametrize(
    "noise", [flow.Noise(3.0), flow.Noise(12.0, lowest=0.85), flow.Noise(12.0, highest=0.9)]
)
def test_noise_is_spread_over_the_schedulers_steps(noise: flow.Noise) -> None:
    sigmas = noise.draw(4000)
    assert noise.lowest <= float(sigmas.min()) < noise.lowest + 0.02
    assert noise.highest - 0.02 < float(sigmas.max()) <= noise.highest
    even = sigmas / (noise.shift - (noise.shift - 1) * sigmas)  # the shift taken back
    assert torch.allclose(even.sort().values.diff(), (even.max() - even.min()) / 3999, atol=5e-4)


def test_a_new_vae_treats_every_frame_by_itself() -> None:
    """A still video is decoded to a still one; so training on pictures is a start for videos."""
    torch.manual_seed(3)
    model = models.autoencoder().eval()
    picture = torch.rand(1, 3, 1, 32, 48) * 2 - 1
    with torch.no_grad():
        one = model.decode(model.encode(picture).latent_dist.mode()).sample
        many = model.decode(model.encode(picture.repeat(1, 1, 9, 1, 1)).latent_dist.mode()).sample
    assert float(one.std()) > 0.01
    assert torch.allclose(many, one.expand_as(many), atol=1e-5)


def test_a_bank_is_read_as_it_was_written(tmp_path: Path) -> None:
    torch.manual_seed(4)
    models.autoencoder().save_pretrained(tmp_path / "vae")
    made = latents.make(tmp_path, seed=5, videos=latents.TOGETHER)
    read = latents.Bank.load(tmp_path / "bank")
    assert read.scenes == made.scenes
    assert not any(scene.held_out for scene in read.scenes)
    assert torch.equal(read.latents, made.latents)
    assert np.array_equal(read.first_frames, made.first_frames)
    given = latents.conditions(tmp_path, made.first_frames)
    assert given.shape == made.latents.shape
    assert torch.equal(given[:, :, 0], made.latents[:, :, 0])  # both begin with the first frame
    assert not torch.allclose(given[:, :, 1:], made.latents[:, :, 1:])
    assert torch.equal(latents.conditions(tmp_path, made.first_frames), given)


@pytest.mark.thorough
def test_training_lowers_the_loss(
    tmp_path: Path, captions: text.Captions, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(6)
    models.autoencoder().save_pretrained(tmp_path / "vae")
    monkeypatch.setattr(log, "EVERY", 20)
    bank = latents.make(tmp_path, seed=5, videos=latents.TOGETHER)
    plan = course.Plan("text", steps=40, rate=3e-3)
    lesson = flow.Lesson(plan, flow.Noise(3.0), ("text", "text_encoder"), batch=4, compiled=False)
    words = captions.encoder.shared.weight.detach().clone()
    flow.train(models.transformer(), captions, bank, lesson, tmp_path, seed=7)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40]
    assert lines[1]["loss"] < 0.9 * lines[0]["loss"]
    learned = UMT5EncoderModel.from_pretrained(tmp_path / "text_encoder").shared.weight
    assert not torch.equal(learned, words)  # the text encoder learns too


@pytest.mark.thorough
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(6)
    models.autoencoder().save_pretrained(tmp_path / "vae")
    bank = latents.make(tmp_path, seed=5, videos=latents.TOGETHER)
    plan = course.Plan("text", steps=9, rate=3e-3, decay=0.1)
    lesson = flow.Lesson(plan, flow.Noise(3.0), ("text", "text_encoder"), batch=2, compiled=False)
    monkeypatch.setattr(state, "EVERY", 4)

    def weights(name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(8)
        captions = text.Captions(tokenizer, models.text_encoder(tokenizer))
        (tmp_path / name).mkdir(exist_ok=True)
        flow.train(models.transformer(), captions, bank, lesson, tmp_path / name, seed=7)
        return dict(WanTransformer3DModel.from_pretrained(tmp_path / name / "text").state_dict())

    expected = weights("whole")

    class Interrupting(course.Log):
        def step(self, number: int, **losses: float) -> None:
            super().step(number, **losses)
            if number == 6:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(course, "Log", Interrupting)
        weights("cut")
    assert (tmp_path / "cut" / "text.state").exists()
    found = weights("cut")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not (tmp_path / "cut" / "text.state").exists()


def test_polishing_changes_the_decoder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    model = models.autoencoder()
    model.save_pretrained(tmp_path / "vae_draft")
    monkeypatch.setattr(autoencoder, "POLISH", course.Plan("polish", steps=3, rate=1e-3, memory=0.5))
    monkeypatch.setattr(autoencoder, "PHASES", [autoencoder.Phase(1.0, 1, 1, 5, 48)])
    autoencoder.polish(tmp_path, seed=11)
    first, then = model.state_dict(), model.from_pretrained(tmp_path / "vae").state_dict()
    changed = {name for name in first if not torch.equal(first[name], then[name])}
    assert {name.split(".")[0] for name in changed} == {"decoder", "post_quant_conv"}


def test_the_vaes_phases_fill_its_training() -> None:
    assert sum(phase.share for phase in autoencoder.PHASES) == pytest.approx(1)
    assert [autoencoder.phase(done) for done in (0.01, 0.5, 1.0)] == list(autoencoder.PHASES)


def test_muon_is_torchs_in_float32() -> None:
    """torch's own rounds to bfloat16 in between, so a step agrees to that."""
    torch.manual_seed(12)
    first = [torch.randn(shape) for shape in ((24, 40), (40, 24), (24, 40), (32, 32))]
    ours, theirs = ([torch.nn.Parameter(one.clone()) for one in first] for _ in range(2))
    mine = muon.Muon(ours, lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=muon.MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for mine_one, other_one in zip(ours, theirs, strict=True):
            mine_one.grad = torch.randn_like(mine_one)
            other_one.grad = mine_one.grad.clone()
        mine.step()
        other.step()
    for mine_one, other_one, began in zip(ours, theirs, first, strict=True):
        moved = (other_one.detach() - began).norm()
        assert float((mine_one.detach() - other_one.detach()).norm() / moved) < 0.02
        assert float(moved) > 0.1
    values = torch.linalg.svdvals(muon.orthogonal(torch.randn(2, 30, 50)))
    assert float(values.min()) > 0.4 and float(values.max()) < 1.3


def test_the_rate_rises_and_falls() -> None:
    shares = [optimizer.share(step / 1000) for step in range(1, 1001)]
    assert max(shares) == pytest.approx(1, abs=0.02)
    assert shares.index(max(shares)) == pytest.approx(30, abs=2)
    assert shares[-1] == pytest.approx(0.01, abs=1e-3)


def test_checkpoints_share_what_several_variants_use(tmp_path: Path) -> None:
    """Those without trained transformers are left out, and the reference loads what is written."""
    torch.manual_seed(9)
    trained, target = tmp_path / "trained", tmp_path / "tiny"
    models.save_tokenizer(trained / "tokenizer")
    models.autoencoder().save_pretrained(trained / "vae")
    models.text_encoder(trained / "tokenizer").save_pretrained(trained / "text_encoder")
    for name in ("text", "high", "low"):
        models.transformer().save_pretrained(trained / name)
    export.write(trained, target)
    assert {folder.name for folder in target.iterdir()} == {"shared", "wan2.1-t2v", "wan2.2-t2v"}
    assert (target / "wan2.2-t2v" / "vae").readlink() == Path("../shared/vae")
    pipe = WanPipeline.from_pretrained(target / "wan2.2-t2v")
    expected = models.transformer().from_pretrained(trained / "low").state_dict()
    found = pipe.transformer_2.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].half().float()) for name in expected)
    assert pipe.scheduler.config.flow_shift == 12
    assert pipe.config.boundary_ratio == 0.875
    pipe.scheduler.set_timesteps(4)


def test_a_student_s_file_is_the_student(tmp_path: Path) -> None:
    """Merged by convert's own code, its LoRA makes the transformer that was trained, whatever it changes."""
    torch.manual_seed(8)
    model, changed = models.transformer().eval(), models.transformer().eval()
    changed.load_state_dict(model.state_dict())
    learned = adapter.Adapter(changed, rank=4)
    with torch.no_grad():
        for part in learned.parts.values():
            part.add_(0.1 * torch.randn_like(part).half().float())
    learned.save(learned.parts, tmp_path / "lora.safetensors")
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    shapes = {"transformer": {name: value.shape for name, value in weights.items()}}
    with open_loras([LoraRequest(tmp_path / "lora.safetensors")], shapes) as loras:
        deltas = loras.deltas("transformer")
        assert len(deltas) > 0.9 * len(weights)  # all but the convolution of patches
        weights = {name: value.copy() for name, value in weights.items()}
        for name, delta in deltas.items():
            delta.add_to(weights[name].reshape(-1), 0)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    given = torch.randn(1, 16, 3, 6, 10), torch.tensor([700.0]), torch.randn(1, 512, models.TEXT_WIDTH)
    with torch.no_grad():
        found, expected = (one(*given, return_dict=False)[0] for one in (model, changed))
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-3  # the file is float16


@pytest.mark.thorough
def test_a_student_learns_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "EVERY", 10)
    monkeypatch.setattr(student, "BATCH", 4)
    rng = np.random.default_rng(9)
    texts = [caption(random_scene(rng), rng) for _ in range(4)]
    points = torch.randn(4, 1, 16, 5, 8, 12) * torch.tensor([*student.LEVELS, 0.1]).view(1, 5, 1, 1, 1, 1)
    name, taught = "wan2.2-t2v-low-noise", student.Ways(texts, points)
    student.learn(name, taught, tmp_path, seed=1, steps=20, compiled=False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] < 0.8 * lines[0]["loss"]
    assert (tmp_path / f"{name}.safetensors").stat().st_size < 2**20


SHAPE = (16, BLOCK, 4, 6)
"""Of a block."""


def test_the_pass_of_training_is_what_the_sampler_does() -> None:
    """Its blocks see one another through a cache, before the window is full and when it moves."""
    torch.manual_seed(2)
    blocks, sigma = causal.WINDOW + 2, 0.625
    model = models.transformer().eval()
    clean, noisy = torch.randn(2, 1, blocks, *SHAPE)
    texts = torch.randn(1, 2, 32, models.TEXT_WIDTH)
    turns = torch.tensor([[0, 0, 1, 1, 1, 0]])
    with torch.no_grad():
        forced = causal.Forced(model, blocks, *SHAPE[-2:])
        expected = forced(clean[:, :-1], noisy, torch.full((1, blocks), sigma), texts, turns)
    sampler = causal.Sampler(model, (1, *SHAPE), seed=0)
    for block, turn in enumerate(turns[0]):
        found = sampler.velocity(noisy[:, block], sigma, texts[:, turn])
        torch.testing.assert_close(found, expected[:, block], atol=1e-4, rtol=1e-4)
        sampler.remember(clean[:, block], texts[:, turn])


def test_a_block_sees_the_first_one_and_those_before_it() -> None:
    assert [causal.seen(block) for block in (0, 1, 3, 4, 9)] == [
        [],
        [0],
        [0, 1, 2],
        [0, 2, 3],
        [0, 7, 8],
    ]


def test_a_causal_model_learns_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "EVERY", 4)
    monkeypatch.setattr(live, "BATCH", 1)
    rng = np.random.default_rng(4)
    scenes, turns = zip(*(random_story(rng, 3, CHANGES) for _ in range(2)), strict=True)
    bank = Stories(list(scenes), np.array(turns), 0.1 * torch.randn(2, 16, 3 * BLOCK, 4, 6).half())
    live.learn(bank, tmp_path, 5, Plan("live", steps=12, rate=3e-3), compiled=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 3  # of the last ones it sees what it made itself
    assert losses[1] < 0.8 * losses[0]
    (tmp_path / export.SHARED).symlink_to(FOLDER / export.SHARED, target_is_directory=True)
    export.write_live(tmp_path, tmp_path / "written")
    written = WanTransformer3DModel.from_pretrained(tmp_path / "written" / "transformer")
    learned = WanTransformer3DModel.from_pretrained(tmp_path / "live")
    assert torch.equal(written.proj_out.weight, learned.proj_out.weight.half())
    config = json.loads((tmp_path / "written" / "transformer" / "config.json").read_text())
    assert (config["local_attn_size"], config["sink_size"], config["num_frames_per_block"]) == (12, 3, 3)
    assert (tmp_path / "written" / "vae" / "config.json").exists()
