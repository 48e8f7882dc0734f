"""Which data a result or a checkpoint was made on, as it records them: data set → edition.

A user's own data may change, or be others, under the same name: their edition ends in a fingerprint of what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from alasso.bench import results, sealed
from alasso.bench.config import RunConfig
from alasso.bench.data.images import folder_edition
from alasso.errors import AlassoError

Editions = Mapping[str, str]
OWN_DATA = "own data"  # how the edition of a stream from Python begins


def unlike(recorded: Editions, now: Editions) -> bool:
    """Whether what was made on the one does not stand for the other."""
    return bool(set(recorded) - set(now)) or any(not _is(recorded.get(name), now[name]) for name in now)


def _is(recorded: str | None, now: str) -> bool:
    """Older versions recorded no fingerprint of a user's images, and of a user's tasks nothing: what is not known is
    not compared.
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


def refuse_changed_images(files: Sequence[tuple[RunConfig, Path]], advice: str) -> None:
    """Refuses results and checkpoints of runs on a folder whose images have changed since.

    Args:
        files: The runs, and the files that would stand for them or go on from.
        advice: What to do where the images have changed.

    Raises:
        AlassoError: If a folder's images have changed, or are gone.
    """
    now: dict[str, dict[str, str]] = {}  # by folder, which is read once
    for config, file in files:
        if config.path is None:
            continue
        if config.path not in now:
            now[config.path] = _images_in(config.path, file)
        if (recorded := recorded_in(file)) and unlike(recorded, now[config.path]):
            raise AlassoError(f"the images in {config.path} have changed since {file.name} was written; {advice}")


def _images_in(folder: str, file: Path) -> dict[str, str]:
    """Their edition by the folder's name; ``file`` was made on them."""
    try:
        return {Path(folder).expanduser().resolve().name: folder_edition(folder)}
    except AlassoError as error:
        instead = ", or see what was found with alasso report" if file.suffix == ".json" else ""
        raise AlassoError(f"{error}; {file.name} was trained on those images: put them back{instead}") from error


def refuse_other_streams(files: Sequence[Path], now: Editions) -> None:
    """Refuses to write over results and checkpoints of another stream: a run's name does not tell streams apart.

    Args:
        files: What the run would write.
        now: The editions of its stream.

    Raises:
        AlassoError: If one of the files is of another stream.
    """
    for file in files:
        if file.exists() and unlike(recorded := _readable_in(file), now):
            raise AlassoError(
                f"{file} holds another stream ({in_words(recorded)}), not {in_words(now)}: "
                "choose another folder as out, or delete it"
            )


def _readable_in(file: Path) -> Editions:
    """What cannot be read may be written over: it is of no use to anybody."""
    try:
        return recorded_in(file)
    except AlassoError:
        return {}


def recorded_in(file: Path) -> Editions:
    """What a result or a checkpoint says of its data; nothing for a broken checkpoint: loading it says why."""
    if file.suffix == ".json":
        return results.read(file).data
    head = sealed.head_of(file)
    return head["data"] if head else {}
