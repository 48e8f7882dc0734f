"""Your own images, a folder a class: learned two classes at a time, with and without ALASSO.

python examples/own_images.py [FOLDER]      # without a folder, it makes one from scikit-learn's digits

The same from the command line: alasso run split-folder FOLDER --method sgd alasso --classes-per-task 2
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from alasso.bench import RunConfig, run


def folder_of_digits(where: Path, images_per_class: int = 100) -> Path:
    """where/0/….png to where/9/….png."""
    digits = load_digits()
    for label in range(10):
        (where / str(label)).mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:images_per_class]):
            image = Image.fromarray((pixels * 255 / 16).astype(np.uint8)).convert("RGB")
            image.save(where / str(label) / f"{number}.png")
    return where


def main(folder: Path | None = None) -> dict[str, float]:
    means = {}
    with tempfile.TemporaryDirectory() as made:
        images = folder or folder_of_digits(Path(made) / "digits")
        for method in ("sgd", "alasso"):
            config = RunConfig.for_benchmark(
                "split-folder", method, path=str(images), classes_per_task=2, image_size=8, model="mlp", hidden=200
            )
            result = run(config, device="cpu")
            for task, row in enumerate(result.accuracy, 1):
                print(f"{method:7} after task {task}: " + " ".join(f"{accuracy:.3f}" for accuracy in row))
            means[method] = result.metrics["A"]
            print(f"{method:7} mean {means[method]:.3f}, forgetting {result.metrics['F']:.3f}")
    return means


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
