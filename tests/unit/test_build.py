"""An image of one's own: each input makes another image and is named when it changes; nothing else does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.build import Build, plan_build
from glm53_service.artifacts.built import REFERENCE, built_labels, built_reference, drift
from glm53_service.errors import ConfigError, UnavailableError
from glm53_service.precheck import ask_image
from glm53_service.settings import Settings
from tests.unit.doubles import make_settings
from tests.unit.fixtures import settings_of, tensorfold_data
from tests.unit.pair import Pair, quick, run_pair
from tests.unit.plugin_loader import CHECKOUT

__all__ = ["quick"]

PIN = "nvcr.io/unit/pytorch@sha256:" + "5" * 64
LINE = "av==14.9.1 --hash=sha256:" + "a" * 64
OWN: dict[str, Any] = {
    "base": PIN,
    "version": "v0.6.6",
    "source": {"path": "/srv/src/tf.tar.gz", "sha256": "c" * 64},
    "extras": [LINE],
    "patches": "patches",
}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """An inventory's folder with two patches, an overlay, and files that are neither."""
    for name, text in (
        ("patches/0001-a.patch", "a"),
        ("patches/0002-b.patch", "b"),
        ("patches/README.md", "no patch"),
        ("patches/v066/0001-c.patch", "of another release"),
        ("overlay/vllm/config.py", "x = 1"),
        ("overlay/.git/HEAD", "hidden"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def planned(
    folder: Path, engine: str = "tensorfold", images: Path = CHECKOUT / "images", **own: Any
) -> Build:
    """Return the build of the example with changes; None takes a key out."""
    data = {key: value for key, value in (OWN | own).items() if value is not None}
    return plan_build(data, engine, folder, images)


def refusals(folder: Path, engine: str = "tensorfold", **own: Any) -> str:
    """Return what is wrong with the example after changes."""
    with pytest.raises(ConfigError) as caught:
        planned(folder, engine, **own)
    return "\n".join(caught.value.problems)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"base": PIN[:-1] + "6"}, f"base changed since the image was built ({PIN}, now {PIN[:-1]}6)"),
    ({"version": "v0.6.0"}, "version changed since the image was built (v0.6.6, now v0.6.0)"),
    ({"source": {"path": "/srv/src/tf.tar.gz", "sha256": "d" * 64}}, "source changed"),
    ({"source": {"requirement": f"tensorfold @ https://x/t.zip --hash=sha256:{'c' * 64}"}}, "source changed"),
    ({"extras": [LINE.replace("14.9.1", "14.9.2")]}, "extras: av changed"),
    ({"extras": []}, "extras: av was taken away"),
    ({"patches": None}, "patches: 0001-a.patch was taken away"),
]


@pytest.mark.parametrize(("own", "reason"), CHANGES, ids=[reason[:22] for _, reason in CHANGES])
def test_each_input_makes_another_image_and_names_itself(
    own: dict[str, Any], reason: str, inventory: Path
) -> None:
    """Prevents an old image under a name that says it is the new one, and a rebuild that nobody explains."""
    before, after = planned(inventory), planned(inventory, **own)
    assert before.reference != after.reference
    assert drift(before.labels, after.inputs)[0].startswith(reason)
    assert drift(after.labels, after.inputs) == ()


def test_a_patch_and_the_dockerfile_are_inputs_by_their_content(inventory: Path) -> None:
    """Prevents a patch that changes and never reaches the image."""
    before = planned(inventory)
    (inventory / "patches/0002-b.patch").write_text("b, corrected")
    (inventory / "patches/0003-c.patch").write_text("c")
    images = inventory / "images"
    shutil.copytree(CHECKOUT / "images", images)
    with (images / "tensorfold/Dockerfile").open("a") as file:
        file.write("# a comment\n")
    assert drift(before.labels, planned(inventory, images=images).inputs) == (
        "Dockerfile changed since the image was built",
        "patches: 0002-b.patch changed since the image was built",
        "patches: 0003-c.patch was added since the image was built",
    )
    assert before.labels["tf.patches"] != planned(inventory).labels["tf.patches"]


def test_order_times_and_places_are_no_inputs(inventory: Path) -> None:
    """Prevents a rebuild after a git clone, or because the same wheels lie elsewhere."""
    two = [LINE, LINE.replace("av", "xgrammar")]
    before = planned(inventory, extras=two)
    text = (inventory / "patches/0001-a.patch").read_text()
    (inventory / "patches/0001-a.patch").unlink()
    (inventory / "patches/0001-a.patch").write_text(text)
    os.utime(inventory / "patches/0002-b.patch", (1, 1))
    (inventory / "patches/README.md").write_text("still no patch")
    moved = {"path": "/elsewhere/tf.tar.gz", "sha256": "c" * 64}
    after = planned(inventory, extras=two[::-1], source=moved, wheels="/srv/wheels")
    assert (after.reference, after.files) == (before.reference, before.files)
    assert built_reference(dict(reversed(before.inputs.items()))) == before.reference
    assert REFERENCE.match(before.reference)


def test_what_docker_is_given(inventory: Path) -> None:
    """Prevents a version that the Dockerfile never hears of, files that do not belong, and a build that asks
    the network for what it has.
    """
    build = planned(inventory)
    assert build.arguments == {"VERSION": "v0.6.6"}
    assert sorted(build.files) == [
        "Dockerfile",
        "patches/0001-a.patch",
        "patches/0002-b.patch",
        "requirements.txt",
    ]
    assert build.files["requirements.txt"].decode() == LINE + "\n"
    assert (build.network, planned(inventory, wheels="/w").network) == (True, False)
    assert planned(inventory, extras=[]).network is False
    assert build.labels["glm53.version"] == "v0.6.6"
    assert len(build.labels["tf.patches"]) == 12
    vllm = planned(inventory, "vllm", version=None, source=None, overlay="overlay")
    assert "overlay/vllm/config.py" in vllm.files
    assert not any("HEAD" in name for name in vllm.files)
    assert vllm.arguments == {}
    assert "version" not in vllm.inputs


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tensorfold", {"base": "nvcr.io/nvidia/pytorch:26.07-py3"}, "a tag can change under you"),
    ("tensorfold", {"base": None}, "base: missing"),
    ("tensorfold", {"version": "main"}, "found 'main'; expected one of v0.6.0, v0.6.6"),
    ("tensorfold", {"source": None}, "source: missing"),
    ("tensorfold", {"source": {"path": "/srv/tf"}}, "path and sha256 belong together"),
    ("tensorfold", {"source": {"requirement": "tensorfold @ git+https://x"}}, "source.requirement: found"),
    ("tensorfold", {"extras": ["av"]}, "extras: found 'av', expected NAME==VERSION --hash="),
    ("tensorfold", {"extras": [LINE, LINE.replace("av", "AV")]}, "extras: av is there twice"),
    ("tensorfold", {"extras": [f"--index-url https://x {LINE}"]}, "extras: found '--index-url"),
    ("tensorfold", {"patches": "nowhere"}, "patches: found no *.patch in"),
    ("tensorfold", {"overlay": "overlay"}, "overlay: for vllm alone"),
    ("tensorfold", {"patch": "patches"}, "patch: unknown key; did you mean 'patches'?"),
    ("vllm", {}, "source: for tensorfold alone"),
    (
        "vllm",
        {"source": None, "version": None, "extras": [], "patches": None},
        "nothing is added to the base",
    ),
]


@pytest.mark.parametrize(("engine", "own", "said"), REFUSED, ids=[said[:30] for *_, said in REFUSED])
def test_what_is_not_pinned_or_not_known_is_refused(
    engine: str, own: dict[str, Any], said: str, inventory: Path
) -> None:
    """Prevents an image that is another one tomorrow, and a key that silently does nothing."""
    assert said in refusals(inventory, engine, **own)


def test_a_label_that_somebody_else_wrote_is_no_proof() -> None:
    """Prevents an image with our name and another content from passing for the one that was asked for."""
    inputs = {"base": PIN, "patches/a.patch": "1"}
    assert drift(built_labels(inputs), inputs) == ()
    assert "was not built for glm53_image_build" in drift(None, inputs)[0]
    assert "was not built for glm53_image_build" in drift({"glm53.built-of": "[]"}, inputs)[0]
    forged = built_labels(inputs) | {"glm53.inputs": "0" * 64}
    assert drift(forged, inputs) == ("the image's label glm53.inputs is not that of its own inputs",)


# The settings


def built(folder: Path, **changes: Any) -> Settings:
    """Return a Spark's settings with an image that the head built."""
    build = planned(folder)
    data = {"image": build.reference, "image_inputs": build.inputs} | changes
    return settings_of(tensorfold_data(**data))


def test_a_tag_is_still_refused_unless_its_inputs_make_it(inventory: Path) -> None:
    """Prevents a tag that anybody could have given from passing where a digest is asked for."""
    assert built(inventory).image_inputs == planned(inventory).inputs
    for changes in ({"image": "glm53/built:0123456789ab"}, {"image": "glm53/built:latest"}, {"image": "a:1"}):
        with pytest.raises(ConfigError, match="a built image has its name from its inputs"):
            built(inventory, **changes)
    with pytest.raises(ConfigError, match="glm53_image_build in the inventory"):
        settings_of(tensorfold_data(image=planned(inventory).reference))
    with pytest.raises(ConfigError, match="expected it by digest"):
        settings_of(tensorfold_data(image="glm53/built:latest"))


@pytest.mark.usefixtures("quick")
def test_the_image_is_held_to_the_settings_before_the_pair_is_stopped(
    tmp_path: Path, inventory: Path
) -> None:
    """Prevents a restart on an image that somebody gave the right name."""

    build = planned(inventory)
    labels = dict(planned(inventory, version="v0.6.0").labels)

    async def story(pair: Pair) -> None:
        docker = pair.docker["a"]
        image = docker.image

        async def labelled(reference: str) -> dict[str, Any]:
            return {**await image(reference), "Config": {"Labels": labels}}

        docker.image = labelled  # type: ignore[method-assign]
        settings = make_settings(tmp_path / "model", image=build.reference, image_inputs=build.inputs)
        with pytest.raises(UnavailableError, match=r"built of something else: version changed .*v0\.6\.6"):
            await ask_image(pair.node("a"), settings, docker, pair.world("a"))
        assert docker.checks == 0
        labels.update(build.labels)
        assert await ask_image(pair.node("a"), settings, docker, pair.world("a")) == ""
        assert docker.checks == 1

    run_pair(tmp_path, story)
