"""Faults by the hundred: kills, full disks, low limits, damaged files. Nothing may be lost, and no result may differ.

    make torture            # some 1,200 faults; the same command resumes, and ends with the totals

Each fault has a number, from which it follows with the seed: what runs, what happens to it, and when. After it the run
is resumed as a user would. Either the result and the weights equal those of an undisturbed run bit for bit, or the
command says in one line why not, with exit code 2, leaves the files as they are, and its advice leads to that result.
Anything else is a failure: a mismatch, a traceback, a loss without a word, a hang. Children are forked from one warm
interpreter: a fault takes some tenths of a second.
"""

from __future__ import annotations

import argparse
import collections
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

import alasso
import torture_trainers
from alasso._digest import digest_of
from alasso.bench import sealed
from alasso.bench.cli import main as cli
from alasso.bench.cli import run as _warm  # noqa: F401  # the command's modules, imported once
from alasso.bench.training import checkpoint
from alasso.bench.training import run as training
from alasso.errors import AlassoError

METHODS = ("alasso", "kron-alasso", "vcl", "vcl-coreset", "si", "ewc", "mas", "imm-mode", "alasso-memory", "multi-task")
SIZE = ("--tasks", "3", "--epochs", "3", "--set", "hidden=16", "--device", "cpu", "--checkpoint-every", "0.01")
LONGEST = 60.0  # seconds that anything here may take; more is a hang
NOBODY = 65534
FAILURES = ("mismatch", "traceback", "lost", "hang")


class Failure(Exception):
    """A fault that was not survived: which kind of failure, and what was seen."""


# -- children ------------------------------------------------------------------------------------------------------


def forked(action, logs):
    """Starts a child that carries out an action, its output in files."""
    sys.stdout.flush()
    for name in ("stdout", "stderr"):
        (logs / name).write_text("")
        (logs / name).chmod(0o666)
    if pid := os.fork():
        return pid
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        action()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def ended(pid):
    """How a child ended; one that does not is killed."""
    limit = time.monotonic() + LONGEST
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise Failure("hang", f"longer than {LONGEST:g} s")


class Run:
    """A run of one method in a folder of its own, begun, disturbed and resumed."""

    def __init__(self, method, folder):
        self.method, self.folder = method, folder
        self.out, self.logs = folder / "out", folder / "logs"
        self.logs.mkdir(parents=True)
        folder.chmod(0o755)
        self.logs.chmod(0o777)

    def start(self, *more, inside=lambda: None, logs=None):
        """The command in a child; ``inside`` is called in it before."""
        logs = logs or self.logs

        def action():
            found_by = training.found_by

            def noted(learner, *given):
                state = learner.state_dict()
                state["optimizer"] = state["optimizer"]["state"]  # its settings have other types once it was loaded
                (logs / "weights").write_text(digest_of(state))
                return found_by(learner, *given)

            training.found_by = noted
            words = ["run", "permuted-digits", "--method", self.method, *SIZE, "--out", str(self.out), *more]
            sys.argv = ["alasso", *words]
            inside()
            cli.main()

        return forked(action, logs)

    def said(self, logs=None):
        return tuple(((logs or self.logs) / name).read_text() for name in ("stdout", "stderr"))

    def path(self):
        """Where its newest checkpoint lies."""
        found = [*self.out.glob("*.checkpoint"), *self.out.glob("*.checkpoint.before")]
        return found[0].with_name(found[0].name.removesuffix(".before")) if found else None

    def until_saved(self, pid, rng, count=1):
        """Waits for so many checkpoints and a moment more; whether the child is still at work."""
        limit = time.monotonic() + LONGEST
        while time.monotonic() < limit:
            if (path := self.path()) and len(checkpoint.kept(path)) >= count:
                time.sleep(rng.uniform(0, 0.1))
                break
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.002)
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def outcome(self, logs=None):
        """What the run found, in numbers, and its weights."""
        files = list(self.out.glob("*.json"))
        if len(files) != 1:
            raise Failure("lost", f"exit code 0, and {len(files)} results")
        found = json.loads(files[0].read_text())
        numbers = {name: found[name] for name in ("accuracy", "ahead", "untrained", "metrics")}
        return numbers, ((logs or self.logs) / "weights").read_text()

    def check(self, code):
        """That a child which may have been hindered ended as it should: by what was done to it, or in one line."""
        stdout, stderr = self.said()
        if "cannot allocate memory for thread-local data" in stderr:
            return  # the C library ends a process that has no memory left for a thread: as a kill does
        if "Traceback" in stdout + stderr or code not in (0, 2, 130, -signal.SIGKILL):
            raise Failure("traceback", f"exit code {code}: {stderr[-600:]}")
        if code == 2 and not one_line(stderr):
            raise Failure("traceback", f"exit code 2 with {stderr[-600:]!r}")

    def resume(self, expected, *, advice=True):
        """Resumes as a user would, following the command's advice once; how it went."""
        good = any(is_whole(file) for file in self.kept())
        before = self.contents()
        code = ended(self.start("--resume"))
        self.check(code)
        stdout, stderr = self.said()
        if code == 0:
            if good and "resuming at" not in stdout and "already done" not in stdout:
                raise Failure("lost", f"started over without a word: {stdout[:300]}")
            if "already done" not in stdout and self.outcome() != expected:
                same = "the numbers" if self.outcome()[0] == expected[0] else "nothing"
                raise Failure("mismatch", f"{same} equal")
            if "already done" in stdout and self.outcome()[0] != expected[0]:
                raise Failure("mismatch", "of a finished result")
            if left := [file.name for file in self.out.iterdir() if file.suffix != ".json"]:
                raise Failure("lost", f"left behind: {left}")
            return "gone back" if "before it" in stderr else "equal"
        if self.contents() != before:
            raise Failure("lost", "refused, and files have changed")
        if not advice or code != 2:
            raise Failure("lost", f"exit code {code}: {stderr}")
        for file in self.kept() if "both" in stderr else self.kept()[:1]:
            file.unlink()
        self.resume(expected, advice=False)
        return "refused"

    def kept(self):
        path = self.path()
        return checkpoint.kept(path) if path else []

    def contents(self):
        files = [file for file in self.out.glob("*") if not file.name.startswith(".")]  # locks and parts come and go
        return {file.name: file.read_bytes() for file in files}


def one_line(stderr):
    lines = [line for line in stderr.splitlines() if "resuming from the checkpoint before it" not in line]
    return len(lines) == 1 and lines[0].startswith("alasso: ")


def is_whole(file):
    try:
        sealed.read(file)
    except AlassoError:
        return False
    return True


# -- faults to what runs -------------------------------------------------------------------------------------------


def signals(*numbers, pause=0.0, delayed=True):
    """Sends signals to a run in the middle of it."""

    def fault(run, rng, expected):
        pid = run.start()
        if run.until_saved(pid, rng, rng.choice((1, 2))) if delayed else not time.sleep(rng.uniform(0, 0.05)):
            for number in numbers:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
                time.sleep(pause)
        run.check(ended(pid))
        return run.resume(expected)

    return fault


def killed_again_and_again(run, rng, expected):
    for _ in range(rng.randrange(2, 5)):
        pid = run.start("--resume")
        if run.until_saved(pid, rng):
            os.kill(pid, signal.SIGKILL)
        if ended(pid) == 0:
            break
    return run.resume(expected)


def hindered(make):
    """Runs with something in the way, then without."""

    def fault(run, rng, expected):
        run.check(ended(run.start(inside=make(rng))))
        return run.resume(expected)

    return fault


def file_size(rng):
    size = int(10 ** rng.uniform(2, 5.2))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def open_files(rng):
    count = rng.randrange(4, 24)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def address_space(rng):
    more = rng.randrange(0, 60 << 20)

    def inside():
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))

    return inside


def full_disk(rng):
    """The system refuses to bring a file to the disk from the n-th on."""
    left, real = rng.randrange(0, 8), os.fsync

    def fsync(descriptor):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    def inside():
        os.fsync = fsync

    return inside


def full_output(rng):
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def removed_folder(run, rng, expected):
    pid = run.start()
    run.until_saved(pid, rng)
    shutil.rmtree(run.out, ignore_errors=True)
    run.check(ended(pid))
    return run.resume(expected)


def read_only_folder(run, rng, expected):
    """Of another user, where this one may become nobody; else without the right to write."""
    before, is_root = run.contents(), os.geteuid() == 0
    run.out.chmod(0o555)
    code = ended(run.start("--resume", inside=(lambda: os.setuid(NOBODY)) if is_root else lambda: None))
    run.out.chmod(0o755)
    run.check(code)
    if code != 2 or run.contents() != before:
        raise Failure("lost", f"exit code {code} in a read-only folder")
    return run.resume(expected)


def jumping_clock(run, rng, expected):
    """The time of day jumps by years whenever it is asked for; half of the runs are killed as well."""
    real, own = time.time, random.Random(rng.random())

    def inside():
        time.time = lambda: real() + own.uniform(-10, 10) * 365 * 86400

    pid = run.start(inside=inside)
    if run.until_saved(pid, rng) and rng.random() < 0.5:
        os.kill(pid, signal.SIGKILL)
    run.check(ended(pid))
    run.check(ended(run.start("--resume", inside=inside)))
    return run.resume(expected)


def second_process(run, rng, expected):
    logs = run.folder / "second"
    logs.mkdir()
    pid = run.start()
    run.until_saved(pid, rng)
    code = ended(run.start("--resume", logs=logs))
    run.check(ended(pid))
    stderr = run.said(logs)[1]
    if code not in (0, 2) or (code == 2 and not one_line(stderr)):
        raise Failure("traceback", f"the second: exit code {code}, {stderr[-600:]}")
    return run.resume(expected)


# -- damage to files -----------------------------------------------------------------------------------------------


def place_in(content, rng):
    """Any byte, but as often of the first line, the head, the beginning and the end of torch's part as elsewhere."""
    start = content.find(b"\n", content.find(b"\n") + 1) + 1
    regions = (
        (0, 150),
        (150, start),
        (start, start + 4000),
        (start, len(content)),
        (len(content) - 3000, len(content)),
    )
    low, high = rng.choice(regions)
    return rng.randrange(max(low, 0), min(max(high, low + 1), len(content)))


def one_byte(content, rng):
    place = place_in(content, rng)
    return content[:place] + bytes([content[place] ^ rng.randrange(1, 256)]) + content[place + 1 :]


def one_bit(content, rng):
    place = place_in(content, rng)
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def sector(content, rng):
    place = place_in(content, rng)
    return content[:place] + rng.choice((bytes(512), rng.randbytes(512))) + content[place + 512 :]


def cut(content, rng):
    return content[: place_in(content, rng)]


def emptied(content, rng):
    return b""


def garbage(content, rng):
    return rng.randbytes(rng.randrange(1, 2 * len(content)))


def longer(content, rng):
    return content + rng.randbytes(rng.randrange(1, 2000))


def without_a_piece(content, rng):
    place = place_in(content, rng)
    return content[:place] + content[place + rng.randrange(1, 600) :]


def damaged(change, which=slice(0, 1)):
    """Damages the newest checkpoint, or others, of a run that was killed."""

    def fault(run, rng, expected):
        for file in run.kept()[which]:
            file.write_bytes(change(file.read_bytes(), rng))
        return run.resume(expected)

    return fault


def put_back(run, rng, expected):
    newest, older = run.kept()
    shutil.copy(older, newest)
    return run.resume(expected)


def exchanged(run, rng, expected):
    newest, older = run.kept()
    content = newest.read_bytes()
    newest.write_bytes(older.read_bytes())
    older.write_bytes(content)
    return run.resume(expected)


def deleted(which):
    def fault(run, rng, expected):
        for file in run.kept()[which]:
            file.unlink()
        return run.resume(expected)

    return fault


def stray_part(run, rng, expected):
    path = run.path()
    (run.out / f".{path.name}.{rng.randrange(10**6)}.part").write_bytes(path.read_bytes()[: rng.randrange(10**4)])
    return run.resume(expected)


def moved_clock(run, rng, expected):
    """Time stamps of another year, as a wrong clock leaves them."""
    for file in run.out.iterdir():
        when = time.time() + rng.uniform(-10, 10) * 365 * 86400
        os.utime(file, (when, when))
    return run.resume(expected)


def damaged_result(change):
    def fault(run, rng, expected):
        run.check(ended(run.start()))
        (file,) = run.out.glob("*.json")
        file.write_bytes(change(file.read_bytes(), rng))
        code = ended(run.start())
        run.check(code)
        if code != 2:
            raise Failure("lost", f"exit code {code} beside a damaged result")
        run.check(ended(run.start("--restart")))
        if run.outcome() != expected:
            raise Failure("mismatch", "after --restart")
        return "refused"

    return fault


def of_another_run(stock):
    def fault(run, rng, expected):
        other = stock.copy(rng.choice([m for m in METHODS if m != run.method]), run.folder / "other", rng)
        shutil.copy(other.kept()[0], run.kept()[0])
        return run.resume(expected)

    return fault


# -- the library, and the trainers' files --------------------------------------------------------------------------

KINDS = ("ALASSO", "KronALASSO", "SI", "EWC", "OnlineEWC", "MAS", "IMM")
ODD = {
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "longer": lambda t: torch.zeros(len(t) + 1 if t.dim() else 3, *t.shape[1:], dtype=t.dtype),
    "one number": lambda t: torch.zeros(1, dtype=t.dtype),
    "NaN": lambda t: torch.full(t.shape, torch.nan),
    "no tensor": lambda t: t.tolist(),
}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))


def trained(kind, stop, between):
    """Two tasks of twenty steps; after ``stop`` of them, ``between`` may replace model, optimizer and regularizer."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(40)]
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    reg = getattr(alasso, kind)(model).attach(optimizer)
    for i, (x, y) in enumerate(batches):
        if i == stop:
            model, optimizer, reg = between(model, optimizer, reg)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i % 20 == 19:
            reg.consolidate(batches[i - 19 : i + 1])
    return digest_of([model.state_dict(), reg.state_dict()])


def library(run, rng, expected):
    """Saves in the middle of a task; damaged fields are refused and change nothing; what was saved goes on."""
    kind, stop, seed = rng.choice(KINDS), rng.randrange(1, 40), rng.random()

    def between(model, optimizer, reg):
        file = run.folder / "state.pt"
        torch.save([model.state_dict(), optimizer.state_dict(), reg.state_dict()], file)
        saved = torch.load(file, weights_only=True)
        own = random.Random(seed)
        other = network()
        other_optimizer = torch.optim.Adam(other.parameters(), 5e-3)
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        other_reg = getattr(alasso, kind)(other).attach(other_optimizer)
        before = digest_of(other_reg.state_dict())
        name, how = own.choice(list(saved[2]["parameters"])), own.choice(list(ODD))
        tensors = saved[2]["parameters"][name]
        field = own.choice(list(tensors))
        changed = {**tensors, field: ODD[how](tensors[field])}
        try:
            other_reg.load_state_dict({**saved[2], "parameters": {**saved[2]["parameters"], name: changed}})
        except AlassoError as error:
            assert "\n" not in str(error), "more than a line"
        else:
            raise AssertionError(f"took {how} for {field} of {name}")
        assert digest_of(other_reg.state_dict()) == before, "refused, and changed"
        other_reg.load_state_dict(saved[2])
        return other, other_optimizer, other_reg

    def action():
        warnings.simplefilter("error")
        print(trained(kind, stop, between), trained(kind, -1, between))

    return in_a_child(run, action, lambda words: words[0] == words[1])


def trainers_file(write, read):
    """Damages what a trainer's callback has written; it is refused in one line, or it is what was saved."""

    def fault(run, rng, expected):
        kind, change = rng.choice(KINDS), rng.choice((one_byte, one_bit, sector, cut, emptied, garbage))

        def action():
            keep = write(kind, run.folder)
            before = digest_of(keep.regularizer.state_dict())
            (file,) = run.folder.glob("*.pt")
            file.write_bytes(change(file.read_bytes(), rng))
            try:
                read(keep, run.folder)
            except AlassoError as error:
                assert "\n" not in str(error), "more than a line"
            print(digest_of(keep.regularizer.state_dict()), before)

        return in_a_child(run, action, lambda words: words[0] == words[1])

    return fault


def killed_training(train, stock):
    """Kills a trainer's whole training; each checkpoint that it left ends as if nothing had been, or is refused."""

    def fault(run, rng, _):
        kind = getattr(alasso, rng.choice(("ALASSO", "KronALASSO", "SI")))  # they need no data, whose order may vary

        def start(file=None):
            return forked(lambda: print(train(kind, run.folder, file)), run.logs)

        if (train, kind) not in stock.expected:
            assert ended(start()) == 0, run.said()
            stock.expected[train, kind] = run.said()[0].split()[-1]
            for one in torture_trainers.checkpoints(run.folder):
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        pid, count, limit = start(), rng.randrange(torture_trainers.EPOCHS + 1), time.monotonic() + LONGEST
        while len(torture_trainers.checkpoints(run.folder)) < count and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(pid, rng.choice((signal.SIGKILL, signal.SIGTERM)))
        ended(pid)
        left = [*torture_trainers.checkpoints(run.folder), None]
        for file in left:
            code = ended(start(file))
            stdout, stderr = run.said()
            if code == 0 and stdout.split()[-1] != stock.expected[train, kind]:
                raise Failure("mismatch", f"after {file}")
            if code == 0:
                return "equal" if file == left[0] else "gone back"
            places = [line for line in stderr.splitlines() if line.startswith("  File ")]
            if "/alasso/" in places[-1] and "\nalasso.errors." not in stderr:
                raise Failure("traceback", stderr[-600:])
        raise Failure("lost", stderr[-600:])

    return fault


def in_a_child(run, action, right):
    code = ended(forked(action, run.logs))
    stdout, stderr = run.said()
    if code:
        raise Failure("traceback", f"exit code {code}: {stderr[-600:]}")
    if not right(stdout.split()):
        raise Failure("mismatch", stdout[-300:])
    return "equal"


def trainers():
    """Faults of the trainers' files, as far as the trainers are installed."""
    found = {}
    try:
        from alasso.integrations import huggingface

        def write(kind, folder):
            keep = huggingface.AlassoCallback(getattr(alasso, kind)(network()))
            huggingface._write_state(keep._state(), folder, writes=True)
            return keep

        found["Hugging Face's file damaged"] = trainers_file(write, lambda keep, folder: keep._load(folder))
    except ImportError:
        pass
    try:
        from alasso.integrations import lightning

        def write_other(kind, folder):
            keep = lightning.AlassoCallback(getattr(alasso, kind)(network()))
            torch.save(keep.state_dict(), folder / "lightning.pt")
            return keep

        def read_other(keep, folder):
            try:
                state = torch.load(folder / "lightning.pt", weights_only=True)
            except Exception:  # Lightning's own refusal
                return
            keep.load_state_dict(state or {})

        found["Lightning's file damaged"] = trainers_file(write_other, read_other)
    except ImportError:
        pass
    return found


# -- all of them ---------------------------------------------------------------------------------------------------


class Stock:
    """Undisturbed results, and folders of runs that were killed with two checkpoints, to be copied and damaged."""

    def __init__(self, folder, each):
        self.folder, self.each = folder, each
        self.expected, self.killed = {}, collections.defaultdict(list)

    def undisturbed(self, method):
        if method not in self.expected:
            run = Run(method, self.folder / f"{method}-undisturbed")
            assert ended(run.start()) == 0, run.said()
            self.expected[method] = run.outcome()
        return self.expected[method]

    def copy(self, method, folder, rng):
        while len(self.killed[method]) < self.each:
            run = Run(method, Path(tempfile.mkdtemp(dir=self.folder)) / "run")
            pid = run.start()
            if run.until_saved(pid, rng, count=2):
                os.kill(pid, signal.SIGKILL)
            ended(pid)
            if len(run.kept()) == 2:
                self.killed[method].append(run)
        source = rng.choice(self.killed[method])
        run = Run(method, folder)
        shutil.copytree(source.out, run.out)
        return run


CHANGES = (one_byte, one_bit, sector, cut, emptied, garbage, longer, without_a_piece)


def faults(stock, with_trainers):
    """Every kind of fault: how often, whether it needs a run that was killed, and what it does."""
    table = {
        "SIGKILL": (8, False, signals(signal.SIGKILL)),
        "SIGKILL at the beginning": (4, False, signals(signal.SIGKILL, delayed=False)),
        "SIGKILL again and again": (3, False, killed_again_and_again),
        "SIGTERM": (4, False, signals(signal.SIGTERM)),
        "SIGINT": (4, False, signals(signal.SIGINT)),
        "SIGINT twice": (3, False, signals(signal.SIGINT, signal.SIGINT, pause=0.01)),
        "SIGHUP": (4, False, signals(signal.SIGHUP)),
        "SIGSTOP and SIGCONT": (3, False, signals(signal.SIGSTOP, signal.SIGCONT, pause=0.05)),
        "disk full": (5, False, hindered(full_disk)),
        "limit of a file's size": (4, False, hindered(file_size)),
        "output full": (2, False, hindered(full_output)),
        "few open files": (4, False, hindered(open_files)),
        "little memory": (4, False, hindered(address_space)),
        "folder removed": (3, False, removed_folder),
        "folder read-only": (3, True, read_only_folder),
        "a second process": (3, False, second_process),
        "clock jumps": (3, False, jumping_clock),
        "older put back": (2, True, put_back),
        "newest and older exchanged": (2, True, exchanged),
        "of another run": (2, True, of_another_run(stock)),
        "newest deleted": (1, True, deleted(slice(0, 1))),
        "older deleted": (1, True, deleted(slice(1, 2))),
        "both deleted": (1, True, deleted(slice(0, 2))),
        "part of a file left": (2, True, stray_part),
        "time stamps moved": (3, True, moved_clock),
        "library, state damaged": (6, False, library),
    }
    for change in CHANGES:
        what = change.__name__.replace("_", " ")
        table[f"newest: {what}"] = (5, True, damaged(change))
        table[f"both: {what}"] = (1, True, damaged(change, slice(0, 2)))
        table[f"older: {what}"] = (1, True, damaged(change, slice(1, 2)))
    for change in (cut, emptied, garbage):
        table[f"result: {change.__name__}"] = (1, False, damaged_result(change))
    if with_trainers:
        table |= {name: (3, False, fault) for name, fault in trainers().items()}
        trainings = torture_trainers.trainings().items()
        table |= {name: (3, False, killed_training(train, stock)) for name, train in trainings}
    return table


def is_damage(name):
    """Whether a fault changes what is in files or which there are, and not a process."""
    files = ("newest", "both", "older", "result", "of another", "part of", "library", "Hugging", "Lightning")
    return name.startswith(files) and not name.endswith("killed")


def one_fault(number, seed, table, stock, folder, methods):
    """Carries out one fault: its name, its method and how it ended."""
    rng = random.Random(f"{seed}/{number}")
    names = list(table)
    name = rng.choices(names, [table[one][0] for one in names])[0]
    method, (_, killed, fault) = rng.choice(methods), table[name]
    found = {"number": number, "fault": name, "method": method}
    here = folder / str(number)
    try:
        expected = stock.undisturbed(method)
        run = stock.copy(method, here, rng) if killed else Run(method, here)
        return {**found, "outcome": fault(run, rng, expected)}
    except Failure as failure:
        return {**found, "outcome": failure.args[0], "why": failure.args[1]}
    finally:
        shutil.rmtree(here, ignore_errors=True)


def warm_up(folder):
    """A run in this process, so that its children need not load what it needs."""
    before = sys.argv, sys.stdout
    sys.argv = ["alasso", "run", "permuted-digits", "--method", "kron-alasso", *SIZE, "--out", str(folder / "warm")]
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    try:
        cli.main()
    except SystemExit as done:
        assert not done.code
    finally:
        sys.argv, sys.stdout = before


def torture(count, seed, log=None, methods=METHODS, each=4, with_trainers=True, kinds=".", tell=lambda line: None):
    """Carries out the faults, of these kinds, that the log does not hold yet; all that it then holds."""
    torch.set_num_threads(1)
    done = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    numbers = {one["number"] for one in done}
    memory = Path("/dev/shm")  # files in memory take no disk's time
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        folder = Path(made)
        folder.chmod(0o755)
        warm_up(folder)
        stock = Stock(folder, each)
        table = {name: fault for name, fault in faults(stock, with_trainers).items() if re.search(kinds, name)}
        for number in range(count):
            if number in numbers:
                continue
            done.append(one := one_fault(number, seed, table, stock, folder, methods))
            if log:
                with log.open("a") as lines:
                    lines.write(json.dumps(one) + "\n")
            if one["outcome"] in FAILURES or number % 50 == 49:
                tell(json.dumps(one))
    return done


def totals(done):
    """Lines with what happened, by fault and in all."""
    outcomes = ("equal", "gone back", "refused", *FAILURES)
    by_fault = collections.defaultdict(collections.Counter)
    for one in done:
        by_fault[one["fault"]][one["outcome"]] += 1
    lines = [f"{'fault':32}" + "".join(f"{outcome:>11}" for outcome in outcomes)]
    for name in sorted(by_fault):
        lines.append(f"{name:32}" + "".join(f"{by_fault[name][outcome]:>11}" for outcome in outcomes))
    in_all = collections.Counter(one["outcome"] for one in done)
    lines.append(f"{'in all':32}" + "".join(f"{in_all[outcome]:>11}" for outcome in outcomes))
    lines.append(f"{len(done)} faults, of which {sum(is_damage(one['fault']) for one in done)} damage files")
    return lines


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--faults", type=int, default=1200, help="how many, counted from number 0")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--kinds", default=".", help="a pattern of their names, for some alone; give them a log")
    words.add_argument("--short", action="store_true", help="a few methods alone, no trainers: for the test suite")
    words.add_argument("--log", type=Path, default=Path("runs/torture.jsonl"), help="what is in it is not done again")
    given = words.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    scale = {"methods": METHODS[:2], "each": 1, "with_trainers": False} if given.short else {}
    scale["kinds"] = given.kinds
    done = torture(given.faults, given.seed, given.log, tell=lambda line: print(line, flush=True), **scale)
    print(*totals(done), f"{time.monotonic() - began:.0f} s", sep="\n")
    sys.exit(any(one["outcome"] in FAILURES for one in done))


if __name__ == "__main__":
    main()
