"""Going on with what is there: results, checkpoints, images that changed."""

import errno
import os
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from alasso import AlassoError
from alasso.bench import io as atomic
from alasso.bench import metrics, results
from alasso.bench.config import RunConfig
from alasso.bench.training import checkpoint
from alasso.bench.training import run as train

from run_helpers import SMALL_FLAGS, break_off, finished, in_process, small


def test_a_disk_that_fills_up_during_a_run_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    config = small(tasks=4)
    real, begun = atomic.whole_file, []

    class FullAfterSome:
        """Takes the first pieces of a file, and then no more."""

        def __init__(self, stream):
            self.stream, self.pieces = stream, 0

        def write(self, content):
            self.pieces += 1
            if self.pieces > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.stream.write(content)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    @contextmanager
    def later_full(path):
        begun.append(path)
        with real(path) as stream:
            yield stream if len(begun) == 1 else FullAfterSome(stream)

    monkeypatch.setattr(checkpoint, "whole_file", later_full)
    with pytest.raises(AlassoError, match="the disk is full; free some space"):
        finished(config, out=tmp_path, checkpoint_every=0.0)
    assert len(begun) == 2
    monkeypatch.setattr(checkpoint, "whole_file", real)
    assert finished(config, out=tmp_path, resume=True).accuracy == finished(config).accuracy


def test_a_damaged_result_is_named_with_a_remedy(tmp_path, monkeypatch, capsys):
    path = tmp_path / f"{small('sgd').name}.json"
    path.write_text("{")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path)
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and f"{path} is not a whole JSON file; delete it, or run it again with --restart" in errors
    code, output, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 0 and "1 result file in" in output, errors
    assert results.read(path).accuracy


def test_an_unfinished_run_is_not_thrown_away_unasked(tmp_path, monkeypatch, capsys):
    config = small("sgd")
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"begun")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path)
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "continue it with --resume, or start over with --restart" in errors
    assert in_process([*words, "--restart"], monkeypatch, capsys)[0] == 0


@pytest.fixture
def begun(tmp_path):
    """A folder with a real checkpoint of a run that was broken off, and the words that go on with it."""
    break_off(small("si", c=0.5), tmp_path)
    return tmp_path, [
        "run",
        "permuted-digits",
        "--method",
        "si",
        "--set",
        "c=0.5",
        *SMALL_FLAGS,
        "--out",
        tmp_path,
        "--resume",
    ]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(words, flag, value):
    words = list(words)
    words[words.index(flag) + 1] = value
    return words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--epochs", 3), "an unfinished run of si has epochs=2, not 3: give its settings to continue it"),
        (("--tasks", 4), "an unfinished run of si has tasks=3, not 4: give its settings"),
        (("--set", "c=0.7"), "an unfinished run of si has c=0.5, not 0.7: give its settings"),
    ],
)
def test_resuming_with_other_settings_is_refused_and_loses_nothing(begun, change, said, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    code, output, errors = in_process(changed(words, *change), monkeypatch, capsys)
    assert code == 2 and said in errors and "leave out --resume to start a new run" in errors
    assert errors.startswith("alasso: ") and len(errors.splitlines()) == 1 and not output
    assert files_in(folder) == before
    code, output, _ = in_process(words, monkeypatch, capsys)  # as advised
    assert code == 0 and "task 3/3" in output and "task 1/3" not in output and not list(folder.glob("*.checkpoint"))


def test_resuming_and_restarting_at_once_is_refused_and_loses_nothing(begun, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    code, output, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 2 and "give one of the two" in errors and len(errors.splitlines()) == 1 and not output
    assert files_in(folder) == before


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (("--device", "gpu"), "there is no device 'gpu'"),
        (("--device", "cuda:99"), "device cuda:99"),
        (("--set", "batch_size=0"), "batch_size must be 1 or more"),
    ],
)
def test_a_restart_that_cannot_start_loses_nothing(begun, mistake, said, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    anew = [word for word in words if word != "--resume"] + ["--restart", *mistake]
    code, _, errors = in_process(anew, monkeypatch, capsys)
    assert code == 2 and said in errors and len(errors.splitlines()) == 1
    assert files_in(folder) == before


def test_a_restart_without_its_data_loses_nothing(tmp_path, monkeypatch, capsys):
    config = RunConfig.for_benchmark("permuted-mnist", "sgd", tasks=1, epochs=1)
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"begun")
    words = ["run", "permuted-mnist", "--method", "sgd", "--tasks", 1, "--epochs", 1, "--out", tmp_path, "--restart"]
    code, _, errors = in_process([*words, "--data-dir", tmp_path / "none"], monkeypatch, capsys)
    assert code == 2 and "none" in errors
    assert files_in(tmp_path) == {f"{config.name}.checkpoint": b"begun"}


def test_a_restart_that_was_stopped_is_gone_on_with_and_the_old_result_kept_until_then(begun, monkeypatch, capsys):
    folder, words = begun
    config = small("si", c=0.5)
    result = folder / f"{config.name}.json"
    undisturbed = train.run(config, device="cpu")
    rows = [[0.5], [0.5, 0.5], [0.5] * 3]
    measures = metrics.summary(rows, ahead=undisturbed.ahead, untrained=undisturbed.untrained)
    results.write(replace(undisturbed, accuracy=rows, metrics=measures), folder)
    older = result.stat().st_mtime_ns - 10**9
    os.utime(result, ns=(older, older))
    begun_later = folder / f"{config.name}.checkpoint"
    os.utime(begun_later)
    code, output, _ = in_process([word for word in words if word != "--resume"], monkeypatch, capsys)
    assert code == 0 and "already done" in output and results.read(result).accuracy[0] == [0.5]
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and "task 3/3" in output and "task 1/3" not in output
    assert results.read(result).accuracy == undisturbed.accuracy and not begun_later.exists()


def test_a_checkpoint_older_than_the_result_is_of_no_use_any_more(begun, monkeypatch, capsys):
    """The run was killed between the two."""
    folder, words = begun
    config = small("si", c=0.5)
    results.write(train.run(config, device="cpu"), folder)
    past = (folder / f"{config.name}.json").stat().st_mtime_ns - 10**9
    os.utime(folder / f"{config.name}.checkpoint", ns=(past, past))
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and "already done" in output and "task 3/3" not in output


def test_resuming_several_settings_none_of_which_was_begun_is_refused_in_one_line(begun, monkeypatch, capsys):
    words = changed(begun[1], "--set", "c=0.1,0.2")
    code, _, errors = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert "for any of these 4 runs; an unfinished run of si has c=0.5, not 0.1: give its settings" in errors


def test_what_starts_anew_beside_what_is_resumed_is_said_and_run(begun, monkeypatch, capsys):
    folder, words = begun
    other = small("si", c=0.5, epochs=1)
    break_off(other, folder)
    code, output, errors = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)
    assert code == 0, errors
    first = output.splitlines()[0]
    assert (
        first.startswith("si, seed 1 has nothing to resume in")
        and "an unfinished run of si has epochs=1, not 2; seed=0, not 1" in first
    )
    assert (folder / f"{other.name}.checkpoint").exists()


def test_resuming_is_quiet_where_nothing_is_amiss(begun, monkeypatch, capsys):
    _, words = begun
    code, output, _ = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)  # the second was not begun yet
    assert code == 0 and "nothing to resume" not in output


def test_resuming_a_method_that_was_never_run_starts_and_says_so(begun, monkeypatch, capsys):
    folder, words = begun
    words = [word for word in changed(words, "--method", "sgd") if word not in ("--set", "c=0.5", "hidden=16")]
    words += ["--set", "hidden=16"]
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    assert output.splitlines()[0] == f"nothing to resume in {folder}; starting"
    code, output, _ = in_process(words, monkeypatch, capsys)  # now it is finished
    assert code == 0 and "nothing to resume" not in output


def test_another_seed_of_settings_that_were_run_here_starts_and_says_so(begun, monkeypatch, capsys):
    """As the jobs of a cluster do, which are all started with --resume."""
    _, words = begun
    code, output, errors = in_process([*words, "--seed", 1], monkeypatch, capsys)
    assert code == 0, errors
    assert "si, seed 1 has nothing to resume in" in output and "an unfinished run of si has seed=0, not 1" in output


def test_a_broken_checkpoint_is_no_hindrance(tmp_path, monkeypatch, capsys):
    (tmp_path / "permuted-digits_sgd_0123456789_s0.checkpoint").write_bytes(b"begun")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path, "--resume")
    assert in_process(words, monkeypatch, capsys)[0] == 0


COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200), "grey": (90, 90, 90)}


def lay_out_images(folder, colours=COLOURS, count=12):
    from PIL import Image

    rng = random.Random(0)
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noisy = tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in colour)
            Image.new("RGB", (20 + i, 24), noisy).save(folder / name / f"{i}.png")


@pytest.fixture
def on_images(tmp_path):
    """A finished run on the user's own images: their folder, and the command."""
    lay_out_images(tmp_path / "images", count=4)
    words = [
        "run",
        "split-folder",
        tmp_path / "images",
        "--epochs",
        1,
        "--image-size",
        8,
        "--method",
        "sgd",
        "--set",
        "batch_size=1",
    ]
    return tmp_path / "images", [*words, "--out", tmp_path / "out", "--device", "cpu", "-q"]


def test_a_result_does_not_stand_for_a_run_on_other_images(on_images, tmp_path, monkeypatch, capsys):
    images, words = on_images
    for _ in range(2):
        code, _, errors = in_process(words, monkeypatch, capsys)
        assert code == 0, errors  # the second time by the first one's result
    (file,) = (tmp_path / "out").glob("*.json")
    before, edition = file.read_bytes(), results.read(file).data["images"]
    assert edition.startswith("folder, 16 images of 4 classes, ")
    lay_out_images(images, {"red": (0, 0, 0)}, count=6)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and file.read_bytes() == before and not output
    assert errors == (
        f"alasso: the images in {images} have changed since {file.name} was written; "
        "run again with --restart, or into another --out\n"
    )
    code, _, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 0, errors
    assert results.read(file).data["images"].startswith("folder, 18 images of 4 classes, ")
    images.rename(tmp_path / "elsewhere")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert errors.startswith(f"alasso: there is no folder {images}; {file.name} was trained on those images: ")


def test_a_checkpoint_is_not_gone_on_from_with_other_images(on_images, tmp_path, monkeypatch, capsys):
    images, words = on_images
    config = RunConfig.for_benchmark("split-folder", "sgd", path=str(images), epochs=1, image_size=8, batch_size=1)
    break_off(config, tmp_path / "out", examples=6)
    saved = tmp_path / "out" / f"{config.name}.checkpoint"
    before = saved.read_bytes()
    lay_out_images(images, {"red": (0, 0, 0)}, count=6)
    code, _, errors = in_process([*words, "--resume"], monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1 and saved.read_bytes() == before
    assert f"the images in {images} have changed since {saved.name} was written; run again with --restart" in errors
    with pytest.raises(
        AlassoError, match=r"was trained on other data \(images: folder, 16 images .*; now images: folder"
    ):
        train.run(config, out=tmp_path / "out", resume=True, device="cpu")
    lay_out_images(tmp_path / "as-before" / "images", count=4)
    images.rename(tmp_path / "changed")
    (tmp_path / "as-before" / "images").rename(images)
    code, _, errors = in_process([*words, "--resume"], monkeypatch, capsys)
    assert code == 0 and not saved.exists(), errors


def test_results_from_before_fingerprints_stand_for_whatever_images_there_are(on_images, tmp_path, monkeypatch, capsys):
    _, words = on_images
    in_process(words, monkeypatch, capsys)
    (file,) = (tmp_path / "out").glob("*.json")
    old = replace(results.read(file), data={"images": "folder"})
    results.write(old, tmp_path / "out")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 0 and results.read(file) == old, errors


def test_own_images_through_split_folder(tmp_path, monkeypatch, capsys):
    lay_out_images(tmp_path / "images", {**COLOURS, "white": (240, 240, 240)})
    words = ["run", "split-folder", tmp_path / "images", "--epochs", 2, "--image-size", 16]
    code, output, errors = in_process([*words, "--out", tmp_path / "out", "--device", "cpu"], monkeypatch, capsys)
    assert code == 0, errors
    assert output.splitlines()[0] == "1 of 5 classes left over, at 2 a task: added to the tasks there are"
    (file,) = (tmp_path / "out").glob("*.json")
    assert len(results.read(file).accuracy) == 2  # five classes: a task of three and one of two
