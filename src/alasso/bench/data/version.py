"""Which data a result or a checkpoint was made on, as it records them: data set → edition.

Data of one's own may change, or be others, under the same name: their edition ends in a fingerprint of what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from alasso.bench.config import RunConfig
from alasso.errors import AlassoError

Editions = Mapping[str, str]
OWN_DATA = "own data"  # how the edition of a stream from Python begins


def unlike(recorded: Editions, now: Editions) -> bool:
    """Whether what was made on the one does not stand for the other."""
    return bool(set(recorded) - set(now)) or any(not _is(recorded.get(name), now[name]) for name in now)


def _is(recorded: str | None, now: str) -> bool:
    """Older versions recorded of one's own images just that they are a folder, and of one's own tasks nothing: what is
    not known is not compared.
    """
    then: dict[str | None, str] = {"folder": "folder", None: OWN_DATA}
    return recorded == now or then.get(recorded) == short(now)


def short(edition: str) -> str:
    """Without the details.

    >>> short("folder, 240 images of 6 classes, 1a2b3c4d"), short("official")
    ('folder', 'official')
    """
    return edition.partition(",")[0]


def in_words(editions: Editions) -> str:
    """
    >>> in_words({"pets": "folder, 9 images of 2 classes, 1a2b3c4d"}), in_words({})
    ('pets: folder, 9 images of 2 classes, 1a2b3c4d', 'nothing known')
    """
    return "; ".join(f"{name}: {edition}" for name, edition in editions.items()) or "nothing known"


# -- images of one's own ----------------------------------------------------------------------------------------


def refuse_changed_images(files: Sequence[tuple[RunConfig, Path]], advice: str) -> None:
    """Results and checkpoints that are to stand for runs on a folder of images, or to be gone on from, must be of the
    images that are in it now; ``advice`` says what to do where they are not.
    """
    now: dict[str, dict[str, str]] = {}  # by folder, which is looked through once
    for config, file in files:
        if config.path is None:
            continue
        if config.path not in now:
            now[config.path] = images_in(config.path, file)
        if unlike(recorded_in(file), now[config.path]):
            raise AlassoError(f"the images in {config.path} have changed since {file.name} was written; {advice}")


def images_in(folder: str, file: Path) -> dict[str, str]:
    """Their edition by the folder's name; ``file`` was made on them."""
    from alasso.bench.data import folder_edition  # numpy and Pillow: only for those who bring images

    try:
        return {Path(folder).expanduser().resolve().name: folder_edition(folder)}
    except AlassoError as error:
        instead = ", or see what was found with alasso report" if file.suffix == ".json" else ""
        raise AlassoError(f"{error}; {file.name} was made on images that were there: put them back{instead}") from error


# -- tasks from Python ------------------------------------------------------------------------------------------


def refuse_those_of_others(files: Sequence[Path], now: Editions) -> None:
    """A run's name does not say which tasks it was given: results and checkpoints of others are not written over."""
    for file in files:
        if file.exists() and unlike(recorded := readable_in(file), now):
            raise AlassoError(
                f"{file} is of another stream ({in_words(recorded)}), not of {in_words(now)}: "
                "give another folder as out, or delete it"
            )


def readable_in(file: Path) -> Editions:
    """What cannot be read may be written over: it is of no use to anybody."""
    try:
        return recorded_in(file)
    except AlassoError:
        return {}


def recorded_in(file: Path) -> Editions:
    """What a result or a checkpoint says of its data. A checkpoint that cannot be read says nothing here: loading it
    says why.
    """
    if file.suffix == ".json":
        from alasso.bench import results

        return results.read(file).data
    from alasso.bench.training import checkpoint

    content = checkpoint.without_weights(file)
    return content["data"] if content else {}
