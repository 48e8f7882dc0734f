"""Files that are whole or not there, and locks that keep processes apart."""

import errno
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from alasso import AlassoError
from alasso.bench import io as disk


def test_what_was_killed_stands_in_nobody_s_way(tmp_path):
    held = "import sys, time; from pathlib import Path; from alasso.bench.io import taken\n"
    held += "with taken(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(AlassoError, match="another process"), disk.taken(tmp_path, "x"):
            pass
        process.kill()
    assert (tmp_path / ".x.lock").exists()
    with disk.taken(tmp_path, "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_what_was_killed_while_it_wrote_leaves_no_part_behind(tmp_path):
    writes = "import os, sys; from pathlib import Path; from alasso.bench.io import whole_file\n"
    writes += "with whole_file(Path(sys.argv[1]) / 'x_s1.checkpoint'): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", writes, str(tmp_path)])
    (part,) = tmp_path.iterdir()
    with disk.taken(tmp_path, "x_s11"):
        assert part.exists()  # may be of another run that is on
    with disk.taken(tmp_path, "x_s1"):
        assert not part.exists()
    assert not list(tmp_path.iterdir())


def test_parts_of_dead_processes_go_when_the_file_is_written_again(tmp_path):
    dead, alive, other = (
        tmp_path / f".{name}.part" for name in ("report[1].html.a1", "report[1].html.b2", "x.html.c3")
    )
    for part in (dead, alive, other):
        part.write_text("half")
    for part in (dead, other):
        os.utime(part, (time.time() - 2 * disk.DEAD_AFTER,) * 2)
    disk.write_whole(tmp_path / "report[1].html", b"whole")
    assert not dead.exists() and alive.exists() and other.exists()


@pytest.mark.parametrize("name", [".alasso-can-write", ".x.json.part", ".x.json.PID.part"])
def test_a_link_that_lies_in_wait_leads_nowhere(name, tmp_path):
    name = name.replace("PID", str(os.getpid()))
    (tmp_path / "precious").write_text("precious")
    (tmp_path / name).symlink_to("precious")
    disk.check_writable(tmp_path)
    disk.write_whole(tmp_path / "x.json", b"whole")
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "x.json").read_bytes() == b"whole"


def test_who_only_looks_whether_a_run_is_taken_takes_it_from_nobody(tmp_path):
    """Each command looks at all its runs first: two that start together both see locks that are held for a moment."""
    for name in "ab":
        (tmp_path / f".{name}.lock").touch()  # of a process that was killed
    look = "import sys; from pathlib import Path; from alasso.bench.io import refuse_taken\n"
    look += "print('ready', flush=True)\n"
    look += "while True: refuse_taken(Path(sys.argv[1]), ['a', 'b'])"
    lookers = [
        subprocess.Popen([sys.executable, "-c", look, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for one in lookers:
            assert one.stdout.readline() == "ready\n"
        for _ in range(50):
            disk.refuse_taken(tmp_path, ["b", "a"])
        assert [one.poll() for one in lookers] == [None, None]  # none was refused
    finally:
        for one in lookers:
            one.kill()
            one.communicate()


def test_commands_that_start_together_do_not_keep_each_other_from_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(disk.check_writable, [tmp_path] * 2000))
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(disk.FileLock, "acquire", refuse)
    with disk.taken(tmp_path, "x"):
        disk.refuse_taken(tmp_path, ["x"])  # nobody can know, and so it refuses nothing
        with disk.taken(tmp_path, "x"):
            assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AlassoError, match="the disk is full; free some space"):
        disk.write_whole(tmp_path / "x.json", b"after")
    assert (tmp_path / "x.json").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_a_file_and_then_its_name_are_brought_to_the_disk(tmp_path, monkeypatch):
    """Power that fails after the new name may otherwise leave it on an empty file."""
    done, real = [], os.fsync

    def noted(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else "file")
        done.append((tmp_path / "x.json").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    disk.write_whole(tmp_path / "x.json", b"content")
    assert done == ["file", False, "folder", True]
