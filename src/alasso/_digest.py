"""Digests, which tell whether what is read is what was saved: of files while they are written, and of states."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from alasso._distributed import is_sharded
from alasso.errors import AlassoError

DIGEST = "digest"  # its name in a state

#: What torch.load raises for what is none of its files, or a damaged one.
UNREADABLE = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


class Sink:
    """A stream for torch's writer, which cannot stand an exception: keeps a disk's refusal for later.

    Writes piece by piece: while the system takes a piece, Python is free for the training.

    Args:
        stream: Where everything goes.

    Attributes:
        digest: SHA-256 of what was written.
        refusal: What the disk said, if it took no more.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.refusal: Exception | None = None

    def write(self, content: memoryview) -> int:
        """Write a piece, unless the disk has refused one."""
        if self.refusal is None:
            try:
                self.stream.write(content)
                self.digest.update(content)
            except Exception as error:
                self.refusal = error
        return len(content)

    def flush(self) -> None:
        """The file is flushed as a whole."""

    def save(self, content: Any) -> None:
        """Write what ``torch.save`` makes of the content; raise what the disk said."""
        # The zip's own checksums take eight times as long as the rest, and nobody compares them when it is read.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(content, self)  # type: ignore[arg-type]
        finally:
            torch.serialization.set_crc32_options(before)
            if self.refusal:
                raise self.refusal


def with_digest(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its digest; a state of shards, of which no rank has all, as it is."""
    digest = digest_of(state)
    return {**state, DIGEST: digest} if digest else dict(state)


def check_digest(state: object, where: str) -> None:
    """Refuse a state that differs from the one that was saved.

    Args:
        state: What was read.
        where: What it was read from, for the message.

    Raises:
        AlassoError: It differs, or holds no digest.
    """
    if not isinstance(state, Mapping):
        raise AlassoError(f"{where} is no state but {type(state).__name__}; resume from another checkpoint")
    saved, found = state.get(DIGEST), digest_of({name: value for name, value in state.items() if name != DIGEST})
    if saved is None and found is None:
        return  # of shards
    if saved is None:
        raise AlassoError(
            f"{where} has no digest: it is damaged, or of an earlier version; resume from another checkpoint"
        )
    if saved != found:
        raise AlassoError(f"{where} is damaged: it is not what was saved; resume from another checkpoint")


def digest_of(state: Any) -> str | None:
    """Return the SHA-256 of everything a state holds, of any device; None if part of it is sharded or no such thing."""
    digest = hashlib.sha256()
    try:
        for piece in _pieces(state):
            digest.update(piece)
    except TypeError:
        return None
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that differ for any two states."""
    if isinstance(value, Tensor):
        if is_sharded(value) or value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise TypeError("no plain numbers")
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        numbers = value.detach().cpu().contiguous().reshape(-1)
        if len(numbers):
            size = numbers.numel() * numbers.element_size()
            yield memoryview((ctypes.c_char * size).from_address(numbers.data_ptr()))  # torch may be without numpy
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        for name, item in value.items():
            yield from _pieces(name)
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, float):
        yield b"float" + struct.pack("<d", value)
    elif value is None or isinstance(value, bool | int | str):
        text = str(value).encode(errors="surrogatepass")
        yield f"{type(value).__name__} {len(text)};".encode() + text
    else:
        raise TypeError(f"no part of a state: {type(value).__name__}")
