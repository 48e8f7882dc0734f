"""The command data."""

from run_helpers import in_process


def test_missing_data_sets_are_wrong_only_where_they_are_named(tmp_path, monkeypatch, capsys):
    nowhere = ["--data-dir", tmp_path]
    code, output, _ = in_process(["data", "check", *nowhere], monkeypatch, capsys)
    assert code == 0 and output.count("all files") == 5 and "scikit-learn" in output
    code, output, _ = in_process(["data", "check", "mnist", *nowhere], monkeypatch, capsys)
    assert code == 2 and output.splitlines()[-1].endswith(f"alasso data fetch mnist --data-dir {tmp_path}")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"wrong")
    code, output, _ = in_process(["data", "check", *nowhere], monkeypatch, capsys)
    assert code == 2 and output.splitlines()[-1].endswith(f"alasso data fetch mnist --data-dir {tmp_path}")


def test_a_truncated_and_a_changed_data_file_are_named(tmp_path, monkeypatch, capsys):
    import gzip

    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"changed" * 100)[:-20])
    words = ("run", "permuted-mnist", "--data-dir", tmp_path, "--out", tmp_path / "out")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "train-images-idx3-ubyte" in errors
