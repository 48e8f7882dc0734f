"""What the digest adds to the writing of a checkpoint: seconds by the clock, and of the writing thread's own work.

    python perf/digest.py [--megabytes 200 --folder . --rounds 15 --record]

Each case writes the same tensors to a file, brings it to the disk and puts it in place, as a checkpoint is written.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import Times, arguments, interleaved, keep, milliseconds, parsed, ratio, spread, table

from alasso._digest import Sink
from alasso._files import whole_file


class NoDigest:
    """Takes everything, and works nothing out."""

    def update(self, content: memoryview) -> None:
        pass


class Checksum:
    """One of zlib's checksums; 32 bits."""

    def __init__(self, of: Callable[[memoryview, int], int]) -> None:
        self.of, self.value = of, 0

    def update(self, content: memoryview) -> None:
        self.value = self.of(content, self.value)


DIGESTS: dict[str, Callable[[], Any]] = {
    "none": NoDigest,
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
    "blake2b": hashlib.blake2b,
    "crc32": lambda: Checksum(zlib.crc32),
    "adler32": lambda: Checksum(zlib.adler32),
}


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=15)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the file is written: which disk")
    options = parsed(parser)
    content = [torch.randn(250_000) for _ in range(options.megabytes)]
    work: Times = {name: [] for name in DIGESTS}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def write(name: str) -> None:
            began = time.thread_time()
            with whole_file(Path(folder) / "x.checkpoint") as stream:
                sink = Sink(stream)
                sink.digest = DIGESTS[name]()
                sink.save(content)
            work[name].append(time.thread_time() - began)

        cases = {name: lambda name=name: write(name) for name in DIGESTS}
        clock = interleaved(cases, options.rounds, "cpu", untimed=0, timed=1)
    found = {
        name: {
            "clock, ms": milliseconds(clock, name),
            "clock, to none": ratio(clock, name, "none"),
            "work, ms": milliseconds(work, name),
            "work, to none": ratio(work, name, "none"),
        }
        for name in DIGESTS
    }
    rows = [
        [name, *(spread(of[c]) if isinstance(of[c], dict) else f"{of[c]:.0f}" for c in of)]
        for name, of in found.items()
    ]
    table(f"A checkpoint of {options.megabytes} MB", ["digest", *found["none"]], rows)
    options.folder = None  # of this machine
    keep("digest", options, {"digests": found})


if __name__ == "__main__":
    main()
