"""Files that are whole or not there, and locks that keep processes apart."""

import errno
import os
import stat
import subprocess
import sys
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
