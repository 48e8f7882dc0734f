"""Damaged and made-up files for every reader: `make fuzz`. Prints inputs, tracebacks, hangs and crashes by reader.

Each input is a good file with a few changes, most of them of its structure: values that are odd, absent, twice, too
deep or too large; others of its bytes. A reader may take a file or raise AlassoError; else it is a traceback.
Each reader runs in a process of its own, within a bound of memory; an input that takes too long is a hang, and one that
ends the process a crash. `--reader NAME --only NUMBER` shows one input again: inputs depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
sys.path[:0] = FOLDERS

import fuzz_readers  # noqa: E402 - beside this file

SECONDS = 5.0  # of computing, for one input: other work on the machine does not count
SILENCE = 120.0  # after which the whole process counts as hung: it waits, or is in C code
MEMORY = 8 << 30  # bytes of addresses; torch alone takes a few
SHOWN = 12  # different tracebacks that are printed


class Hang(BaseException):
    """An input took too long. No Exception: nothing on the way catches it."""


def on_alarm(number, frame):
    raise Hang


def place_of(error):
    """Where an error was raised, in the deepest frame of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/alasso/" in frame.filename] or frames[-1:]
    name = Path(ours[-1].filename).name if ours else "?"
    return f"{type(error).__name__} {name}:{ours[-1].lineno if ours else 0} {' '.join(str(error).split())[:90]}"


def work(name, seed, first, count, progress, only=None):
    """Runs inputs in this process; returns what happened."""
    from alasso.errors import AlassoError

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, on_alarm)
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None, prefix="alasso-fuzz-"))
    found = {"inputs": 0, "taken": 0, "tracebacks": Counter(), "hangs": [], "where": {}}
    try:
        make, read = fuzz_readers.READERS[name].ready(folder)
        with suppress(Exception):
            read(make(random.Random(0)))  # whatever is imported at first use
        with Path(progress).open("r+b") as marks:
            for index in range(first, first + count):
                os.pwrite(marks.fileno(), struct.pack("<q", index), 0)
                given = make(random.Random(f"{seed}/{name}/{index}"))
                if only is not None:
                    print(repr(given)[:4000])
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    read(given)
                    found["taken"] += 1
                except AlassoError:
                    pass
                except Hang:
                    found["hangs"].append(index)
                except Exception as error:
                    if only is not None:
                        traceback.print_exc()
                    place = place_of(error)
                    found["tracebacks"][place] += 1
                    found["where"].setdefault(place, index)
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                found["inputs"] += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def in_children(name, seed, count):
    """Runs a reader in processes of its own, a new one after each crash; returns the sum."""
    total = {"inputs": 0, "taken": 0, "tracebacks": Counter(), "hangs": [], "crashes": [], "where": {}, "memory": 0}
    first = 0
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(struct.pack("<q", -1))
        progress.flush()
        while first < count and len(total["crashes"]) < 100:
            words = [
                sys.executable,
                __file__,
                "--child",
                name,
                str(seed),
                str(first),
                str(count - first),
                progress.name,
            ]
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            silent = watched(child, progress.name)
            said, complaint = child.communicate()
            if child.returncode == 0:
                found = json.loads(said.splitlines()[-1])
                for part in ("inputs", "taken"):
                    total[part] += found[part]
                total["hangs"] += found["hangs"]
                total["tracebacks"].update(found["tracebacks"])
                total["where"] = {**found["where"], **total["where"]}
                total["memory"] = max(total["memory"], found["memory"])
                break
            last = mark(progress.name)
            if last < first:
                raise SystemExit(f"{name} could not begin:\n{complaint[-2000:]}")
            total["inputs"] += last + 1 - first
            total["hangs" if silent else "crashes"].append(last)
            first = last + 1
    return total


def mark(file):
    return struct.unpack("<q", Path(file).read_bytes()[:8])[0]


def watched(child, file):
    """Waits for a process; ends it, and says so, where it makes no progress."""
    last, since = None, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.5)
            return False
        now = mark(file)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > SILENCE:
            child.kill()
            return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all inputs; 1: over a million")
    parser.add_argument("--reader", nargs="*", help="some readers; default: all")
    parser.add_argument("--only", type=int, help="one input of one reader, shown")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, seed, first, count, progress = given.child
        print(json.dumps(work(name, seed, int(first), int(count), progress)))
        return 0
    names = given.reader or list(fuzz_readers.READERS)
    if given.only is not None:
        with tempfile.NamedTemporaryFile() as progress:
            print(work(names[0], given.seed, given.only, 1, progress.name, given.only))
        return 0
    print(f"{'reader':<28}{'inputs':>10}{'taken':>10}{'tracebacks':>12}{'hangs':>7}{'crashes':>9}{'MB':>7}{'s':>7}")
    sums, lines = Counter(), []
    for name in names:
        started = time.monotonic()
        found = in_children(name, given.seed, max(1, round(given.share * fuzz_readers.READERS[name].inputs)))
        row = {key: found[key] for key in ("inputs", "taken")} | {
            "tracebacks": sum(found["tracebacks"].values()),
            "hangs": len(found["hangs"]),
            "crashes": len(found["crashes"]),
        }
        sums.update(row)
        print(line(name, row) + f"{found['memory']:>7}{time.monotonic() - started:>7.0f}", flush=True)
        for place, count in found["tracebacks"].most_common(SHOWN):
            lines.append(f"{name}: {count} × {place} (--only {found['where'][place]})")
        lines += [f"{name}: {kind} at {found[kind][:8]}" for kind in ("hangs", "crashes") if found[kind]]
    print(line("all", sums))
    print("\n".join(lines))
    return 1 if lines else 0


def line(name, row):
    return (
        f"{name:<28}{row['inputs']:>10,}{row['taken']:>10,}{row['tracebacks']:>12}{row['hangs']:>7}{row['crashes']:>9}"
    )


if __name__ == "__main__":
    sys.exit(main())
