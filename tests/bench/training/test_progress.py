"""What is told of a run, and how it is stopped."""

import csv
import errno
import io
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from alasso.bench.cli import main as cli
from alasso.bench.training import progress
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.progress import CsvLog, MlflowLog, Observer, TensorBoardLog, WandbLog
from alasso.bench.training.run import Trainer
from alasso.errors import AlassoError

from run_helpers import begun, break_off, finished, small


@pytest.mark.parametrize(
    ("sent", "on_ctrl_c"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),
        (signal.SIGHUP, signal.default_int_handler),  # the terminal was closed
    ],
)
def test_ctrl_c_and_a_polite_kill_stop_cleanly_and_say_how_to_go_on(sent, on_ctrl_c, tmp_path):
    """Also where a shell has Ctrl-C ignored, for what it puts in the background."""
    words = ["run", "permuted-digits", "--tasks", "50", "--epochs", "50", "--set", "hidden=16"]
    words += ["--device", "cpu", "--out", str(tmp_path)]
    before = signal.signal(signal.SIGINT, on_ctrl_c)  # children inherit what is ignored
    process = subprocess.Popen(
        [sys.executable, "-m", "alasso", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    try:
        process.stdout.readline()  # the first task is done
        process.send_signal(sent)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 130 and "Traceback" not in errors
    assert (
        f"alasso run permuted-digits --tasks 50 --epochs 50 --set hidden=16 --device cpu --out {tmp_path} --resume"
        in output
    )
    assert list(tmp_path.glob("*.checkpoint"))


@pytest.mark.parametrize(("kind", "code"), [(BrokenPipeError, 141), (OSError, 2)])
def test_where_lines_cannot_be_written_training_stops_and_is_saved(kind, code, tmp_path, monkeypatch, capsys):
    """Nobody reads on, as in ``alasso run … | head -2``; or the disk is full that they go to."""
    spoken = []

    class Deaf(io.StringIO):
        def write(self, text):
            spoken.append(text)
            if sum("\n" in line for line in spoken) > 2:
                raise kind(errno.ENOSPC, "No space left on device")
            return len(text)

    words = ["run", "permuted-digits", "--tasks", 50, "--set", "hidden=16", "--device", "cpu", "--out", tmp_path]
    monkeypatch.setattr(sys, "stdout", Deaf())
    monkeypatch.setattr(sys, "argv", ["alasso", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert [path.suffix for path in tmp_path.iterdir()] == [".checkpoint"]
    if code == 2:
        said = "alasso: cannot write the output: No space left on device\n"
        assert capsys.readouterr().err == said


def test_ctrl_c_pressed_twice_in_a_moment_is_one_request(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.stop_on_request() as asked:
        assert not asked()
        for moment in (100.0, 100.9):
            now[0] = moment
            signal.raise_signal(signal.SIGINT)
            assert asked()
        now[0] = 101.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class Heard(Observer):
    """Keeps what it is told of epochs and tasks."""

    wants_epochs = True

    def __init__(self):
        self.epochs, self.tasks = [], []

    def epoch_done(self, t, epoch, loss, penalty, accuracy, seconds_left):
        self.epochs.append((t, epoch, loss, penalty, len(accuracy)))

    def task_done(self, t, accuracy, seconds_left):
        self.tasks.append((t, len(self.epochs)))


def test_what_is_told_later_as_on_a_gpu_is_the_same():
    heard = []
    for later in (False, True):
        observer = Heard()
        trainer = Trainer(begun(small()), Position(), observer)
        trainer.tells_later = later
        trainer.train()
        heard.append(observer)
    assert heard[0].epochs == heard[1].epochs and len(heard[0].epochs) == 3 * 2
    assert heard[0].tasks == heard[1].tasks == [(t, 2 * (t + 1)) for t in range(3)]
    assert all(loss > 0 for _, _, loss, _, _ in heard[0].epochs)
    assert [penalty > 0 for _, _, _, penalty, _ in heard[0].epochs] == [False] * 2 + [True] * 4


def test_csv_log(tmp_path):
    log = CsvLog(tmp_path / "deep" / "x.csv")
    finished(small(), observer=log)
    log.close()
    lines = (tmp_path / "deep" / "x.csv").read_text().splitlines()
    assert lines[0] == "seconds,task,epoch,loss,penalty,learned,mean_accuracy"
    assert len(lines) == 1 + 3 * (2 + 1)  # epochs and the task's end, for each of three tasks


def logged(path, **options):
    log = CsvLog(path)
    finished(small(), observer=log, **options)
    log.close()
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_csv_log_holds_each_row_once_after_a_restart_or_a_kill(tmp_path):
    path = tmp_path / "x.csv"
    first = logged(path)
    with path.open("a") as file:
        file.write("0.1,3")  # killed while it wrote
    restarted = logged(path)
    break_off(small(), tmp_path)  # in the second task; the log goes on beyond it, as after a kill
    resumed = logged(path, out=tmp_path, resume=True)
    for rows in (restarted, resumed):
        assert [row[1:] for row in rows] == [row[1:] for row in first]
    assert resumed[:4] == restarted[:4]  # the header and the first task's rows stay


def test_tensorboard_counts_epochs_from_the_run_s_beginning(tmp_path, monkeypatch):
    told = []

    class Board:
        def __init__(self, folder):
            self.close = lambda: None

        def add_scalar(self, name, value, number):
            told.append((name, number))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    break_off(small(), tmp_path)
    finished(small(), out=tmp_path, resume=True, observer=TensorBoardLog(tmp_path / "board", small()))
    assert [number for name, number in told if name == "loss"] == [3, 4, 5, 6]  # of two epochs in each of three tasks


def told_by(tracker, folder):
    """A whole run told to a tracker."""
    log = tracker(folder, small())
    finished(small(), observer=log)
    log.close()


LAST = {"loss": 6, "penalty": 6, "accuracy/learned": 3, "accuracy/mean": 3}  # two epochs in each of three tasks


def test_wandb_offline_gets_every_number(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    rows, real = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data: (rows.append(data), real(run, data)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told_by(WandbLog, tmp_path)
    (file,) = tmp_path.rglob("*.wandb")
    assert small().name.encode() in file.read_bytes()
    assert [row["epoch"] for row in rows if "loss" in row and "penalty" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["task"] for row in rows if "accuracy/learned" in row and "accuracy/mean" in row] == [1, 2, 3]


def test_wandb_keeps_runs_apart_that_train_at_the_same_time(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logs = [WandbLog(tmp_path, small(seed=seed)) for seed in (0, 1)]
        logs[0].close()
        logs[1].tell({"loss": 1.0}, "epoch", 1)
        logs[1].close()
    assert len(list(tmp_path.rglob("*.wandb"))) == 2


def test_mlflow_holds_every_number(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
        pytest.importorskip("sqlalchemy", reason="comes with mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told_by(MlflowLog, tmp_path / "runs")  # which nobody has made
        told_by(MlflowLog, tmp_path / "runs")  # into the same experiment
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("alasso")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 2 and {one.info.run_name for one in found} == {small().name}
    history = {name: client.get_metric_history(found[0].info.run_id, name) for name in LAST}
    assert {name: len(values) for name, values in history.items()} == LAST
    params = {name: str(value) for name, value in small().flat().items()}  # a column a setting
    assert found[0].data.params == params and found[0].info.status == "FINISHED"


def test_what_mlflow_refuses_is_one_line(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(AlassoError, match=r"^MLflow: [^\n]*$"):
        MlflowLog(tmp_path, small())


@pytest.mark.parametrize(
    ("tracker", "module"),
    [(TensorBoardLog, "torch.utils.tensorboard"), (WandbLog, "wandb"), (MlflowLog, "mlflow")],
)
def test_a_tracker_that_is_missing_is_named_with_its_extra(tracker, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AlassoError, match=r"is not installed: pip install 'alasso\["):
        tracker(tmp_path, small())
