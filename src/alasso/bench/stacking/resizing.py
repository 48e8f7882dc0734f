"""Images brought to the size they are trained with: once a task, where a GPU has the room, and not at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alasso.bench.streams import Examples, same_place

AT_ONCE = 1024  # images
ROOM_FOR_IMAGES = 1 / 4  # of what a GPU has left


def brought_to_size(of_lanes: Sequence[Examples]) -> list[Examples]:
    """The examples of each lane, resized; as they are, where that would take more than a quarter of the room."""
    if not any(map(bytes_at_size, of_lanes)):
        return list(of_lanes)
    first_like = [next(i for i, other in enumerate(of_lanes) if same_examples(own, other)) for own in of_lanes]
    apart = {i: of_lanes[i] for i in first_like}
    if sum(map(bytes_at_size, apart.values())) > ROOM_FOR_IMAGES * room_on(of_lanes[0].images.device):
        return list(of_lanes)
    resized = {i: at_size(examples) for i, examples in apart.items()}
    return [resized[i] for i in first_like]


def at_size(examples: Examples) -> Examples:
    """The same examples, with nothing left to be done at a step but to pick them."""
    if not bytes_at_size(examples):
        return examples
    everything = torch.arange(len(examples), device=examples.images.device)
    images = torch.empty(shape_at_size(examples), dtype=torch.float32, device=examples.images.device)
    for index in everything.split(AT_ONCE):  # little room is needed beside the outcome
        images[index], _ = examples.batch(index)
    return Examples(images, examples.labels if examples.rows is None else examples.labels[examples.rows])


def lanes_in(room: int, needed: int, images: int) -> int:
    """How many lanes go into the room, each of which needs so much, and images at their size beside it if all get them.

    >>> lanes_in(100, 10, 0), lanes_in(100, 10, 5), lanes_in(100, 10, 10)
    (8, 5, 8)
    """
    with_images = int(0.8 * room / (needed + images))
    return max(1, with_images if with_images * images <= ROOM_FOR_IMAGES * room else int(0.8 * room / needed))


def bytes_at_size(examples: Examples) -> int:
    """What images that have to be resized take once they are; those that have not take nothing more."""
    if examples.size is None or examples.images.shape[-1] == examples.size:
        return 0
    return shape_at_size(examples).numel() * torch.float32.itemsize


def shape_at_size(examples: Examples) -> torch.Size:
    *channels, height, width = examples.images.shape[1:]
    return torch.Size([len(examples), *channels, examples.size or height, examples.size or width])


def same_examples(one: Examples, other: Examples) -> bool:
    """Whether two lanes learn from the same images in the same way: two methods with one seed do."""
    if (one.size, one.scale) != (other.size, other.scale):
        return False
    parts = ((one.rows, other.rows), (one.pixels, other.pixels), (one.labels, other.labels))
    return same_place(one.images, other.images) and all(same_numbers(*pair) for pair in parts)


def same_numbers(one: Tensor | None, other: Tensor | None) -> bool:
    if same_place(one, other):
        return True
    return one is not None and other is not None and torch.equal(one, other)


def room_on(device: torch.device) -> int:
    """Bytes that a GPU has left, those that torch keeps to itself included. Of a CPU's memory others have use."""
    if device.type != "cuda":
        return 0
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
