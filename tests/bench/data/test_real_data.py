"""Checks on real data, minutes each: `make test-slow`, with the data sets fetched or ALASSO_DATA set."""

import numpy as np
import pytest

from alasso import AlassoError
from alasso.bench import data
from alasso.bench.config import RunConfig
from alasso.bench.training import run as train

pytestmark = pytest.mark.slow


def needs(*names):
    try:
        for name in names:
            data.load(name)
    except AlassoError as error:
        pytest.skip(str(error))


def test_mnist_is_the_published_one():
    needs("mnist")
    images = data.load("mnist")
    assert images.train_images.shape == (60_000, 1, 28, 28) and images.test_images.shape == (10_000, 1, 28, 28)
    assert np.bincount(images.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_three_permuted_mnist_tasks_with_the_full_network_on_a_cpu():
    needs("mnist")
    result = train.run(RunConfig.for_benchmark("permuted-mnist", "alasso", tasks=3, epochs=1), device="cpu")
    assert result.metrics["learning_accuracy"] >= 0.96


def test_split_cifar_says_which_edition_it_ran_on():
    needs("cifar10", "cifar100")
    result = train.run(RunConfig.for_benchmark("split-cifar", "alasso", tasks=5, epochs=1), device="cpu")
    assert result.data["cifar10"] == "official" and result.data["cifar100"] in ("official", "re-split")


@pytest.mark.xfail(strict=False, reason="single runs lie at 0.936 ± 0.007; see paper/REPRODUCTION.md")
@pytest.mark.gpu
def test_the_papers_main_experiment_on_a_gpu():
    needs("mnist")
    result = train.run(RunConfig.for_benchmark("permuted-mnist", "alasso"), device="cuda")
    assert result.metrics["A"] >= 0.940 and result.metrics["F"] <= 0.032
