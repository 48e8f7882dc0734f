"""The faults of ``make torture``, a few of them: none costs a result or changes one."""

import json
import os
import subprocess
import sys

import pytest

import measure_code

TORTURE = measure_code.ROOT / "tools" / "torture.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_thirty_faults_are_survived(tmp_path):
    log = tmp_path / "log.jsonl"
    words = [sys.executable, str(TORTURE), "--short", "--faults", "30", "--seed", "5", "--log", str(log)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    faults = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(faults) == 30 and {one["outcome"] for one in faults} == {"equal", "gone back", "refused"}
